"""Which tiles the programs of a persistent kernel take in static order."""

import types

import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

from jaxops._lib.gluon import tile_scheduler_triton as scheduler


def tiles_of(program: int, programs: int, tiles: int, monkeypatch) -> list[int]:
    """Of a program, by the kernel's own function with Python's integers."""
    gl = types.SimpleNamespace(
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        num_ctas=lambda: 1,
        cdiv=lambda a, b: -(-a // b),
        where=lambda condition, a, b: a if condition else b,
    )
    monkeypatch.setattr(scheduler, "gl", gl)
    found, t = [], scheduler.next_in_order.fn(program - programs, tiles)
    while t < tiles:
        found.append(t)
        t = scheduler.next_in_order.fn(t, tiles)
    return found


@pytest.mark.parametrize("programs", [1, 2, 7, 132])
def test_next_in_order(programs, monkeypatch):
    """Each tile once. In a wave that is not full no pair of programs has two while another one has none."""
    for tiles in (0, 1, programs // 2, programs // 2 + 1, programs - 1, programs, 2 * programs + 1, 4 * programs - 2):
        found = [tiles_of(program, programs, tiles, monkeypatch) for program in range(programs)]
        assert sorted(t for own in found for t in own) == list(range(tiles))
        waves = tiles // programs
        last = [[t for t in own if t >= waves * programs] for own in found]
        pairs = [[*last[i], *last[i + 1]] for i in range(0, programs - 1, 2)]
        assert not ([] in pairs and any(len(pair) == 2 for pair in pairs))
        assert all(pair[1] == pair[0] + 1 for pair in pairs if len(pair) == 2), "beside each other"
