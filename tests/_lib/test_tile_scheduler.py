"""Which tiles the programs of a persistent kernel take in static order. Other tests see only that each is computed."""

import types

import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

from jaxops._lib.gluon import tile_scheduler_triton as scheduler

pytestmark = pytest.mark.versions


def tiles_of(program: int, programs: int, tiles: int, monkeypatch) -> list[int]:
    """The tiles of a program, by the kernel's own function with Python's integers."""
    numbers = {"program_id": lambda axis: program, "num_programs": lambda axis: programs, "num_ctas": lambda: 1}
    arithmetic = {"cdiv": lambda a, b: -(-a // b), "where": lambda condition, a, b: a if condition else b}
    monkeypatch.setattr(scheduler, "gl", types.SimpleNamespace(**numbers, **arithmetic))
    taken, t = [], scheduler.next_in_order.fn(program - programs, tiles)
    while t < tiles:
        taken.append(t)
        t = scheduler.next_in_order.fn(t, tiles)
    return taken


@pytest.mark.parametrize("programs", [1, 7, 132])
def test_no_pair_idles(programs, monkeypatch):
    """Each tile once. In a wave that is not full no pair of programs has two tiles while another one has none."""
    for tiles in (0, programs // 2 + 1, programs - 1, programs, 2 * programs + 1, 4 * programs - 2):
        taken = [tiles_of(program, programs, tiles, monkeypatch) for program in range(programs)]
        assert sorted(t for own in taken for t in own) == list(range(tiles))
        last = [[t for t in own if t >= tiles // programs * programs] for own in taken]
        pairs = [[*last[i], *last[i + 1]] for i in range(0, programs - 1, 2)]
        assert not ([] in pairs and any(len(pair) == 2 for pair in pairs))
        assert all(pair[1] == pair[0] + 1 for pair in pairs if len(pair) == 2), "beside each other"
