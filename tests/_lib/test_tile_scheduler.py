"""Which tiles the programs of a persistent kernel take, and where they lie. Other tests see only that each is
computed."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

from jaxops._lib.gluon import tile_scheduler_triton as scheduler
from jaxops._lib.ragged.work_list import COLUMNS

pytestmark = pytest.mark.versions


def first_tile(program: int, programs: int, tiles: int, monkeypatch) -> int:
    """By the kernel's own function with Python's integers."""
    numbers = {"program_id": lambda axis: program, "num_programs": lambda axis: programs, "num_ctas": lambda: 1}
    arithmetic = {"cdiv": lambda a, b: -(-a // b), "where": lambda condition, a, b: a if condition else b}
    monkeypatch.setattr(scheduler, "gl", types.SimpleNamespace(**numbers, **arithmetic))
    return scheduler.first_tile.fn(tiles)


@pytest.mark.parametrize("programs", [1, 7, 132])
def test_no_pair_idles(programs, monkeypatch):
    """Of fewer tiles than programs each is taken once. No pair of programs has two while another one has none."""
    for tiles in (0, programs // 2 + 1, programs - 1, programs, 2 * programs):
        first = [first_tile(program, programs, tiles, monkeypatch) for program in range(programs)]
        taken = [t for t in first if t < tiles]
        assert sorted(taken) == list(range(min(tiles, programs)))
        pairs = [[t for t in first[i : i + 2] if t < tiles] for i in range(0, programs - 1, 2)]
        assert not ([] in pairs and any(len(pair) == 2 for pair in pairs))
        assert all(pair[1] == pair[0] + 1 for pair in pairs if len(pair) == 2), "beside each other"


@pytest.mark.hopper
@pytest.mark.parametrize("panel", [1, 4, 500])
def test_panels_lie_in_groups(panel, monkeypatch):
    """Each tile once; a panel's tiles are in one group, column by column, and a group's panels are about as high as
    asked for, and as high as each other."""
    from jaxops._lib.gluon.schedule_triton import schedule_rows  # here: the simulator's, where there is no GPU

    bm, num_j, sizes = 16, 3, [3, 0, 16 * 4, 16 * 5 + 1, 16 * 13, 1]
    offsets = np.concatenate([[20], 20 + np.cumsum(sizes)]).astype(np.int32)
    schedule, entries = schedule_rows(jnp.asarray(offsets), int(offsets[-1]) + 9, bm, panel=panel)
    group, start, _, _, total, _ = (work := np.asarray(schedule))[: COLUMNS * entries].reshape(COLUMNS, -1)
    monkeypatch.setattr(scheduler, "gl", types.SimpleNamespace(load=lambda i: int(work[i])))
    monkeypatch.setattr(scheduler, "PANEL_BASE", scheduler.PANEL_BASE.value)
    place = scheduler.place_in_panel_of_group.fn
    places = [place(t, 0, entries, num_j) for t in range(total[0] * num_j)]
    assert sorted(places) == [(i, j) for i in range(total[0]) for j in range(num_j)]
    panels, seen = [], 0
    while seen < len(places):
        first = places[seen][0]
        high = next((n for n in range(1, len(places) - seen) if places[seen + n][1]), len(places) - seen)
        assert places[seen : seen + high * num_j] == [(first + i, j) for j in range(num_j) for i in range(high)]
        assert len(set(group[first : first + high])) == 1
        panels.append((int(group[first]), int(start[first]) < 20, high))
        seen += high * num_j
    heights = [[high for g, before, high in panels if (g, before) == (number, False)] for number in range(6)]
    wanted = {1: [[1], [], [1] * 4, [1] * 6, [1] * 13, [1]], 4: [[1], [], [4], [3, 3], [5, 5, 3], [1]]}
    assert heights == wanted.get(panel, [[1], [], [4], [6], [13], [1]])


@pytest.mark.hopper
def test_panels_end_with_the_list(monkeypatch):
    """Also where offsets break the contract, and need more tiles than the list has."""
    from jaxops._lib.gluon.schedule_triton import schedule_rows

    schedule, entries = schedule_rows(jnp.array([0, 100] * 15, jnp.int32), 100, 8, panel=4)
    work = np.asarray(schedule)
    monkeypatch.setattr(scheduler, "gl", types.SimpleNamespace(load=lambda i: int(work[i])))
    monkeypatch.setattr(scheduler, "PANEL_BASE", scheduler.PANEL_BASE.value)
    total = int(work[4 * entries])
    places = [scheduler.place_in_panel_of_group.fn(t, 0, entries, 5) for t in range(5 * total)]
    assert all(0 <= i < total and j >= 0 for i, j in places)
