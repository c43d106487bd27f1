"""Where the Hopper kernel's tiles read and write: the producer's arithmetic on Python's numbers."""

import types

import numpy as np
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

from jaxops._lib.gluon import tile_scheduler_triton
from jaxops._lib.gluon.gemm_triton import advance
from jaxops.ops.fp8_matmul import produce_triton
from jaxops.ops.fp8_matmul.plan import HOPPER_TILES

DENSE = 0
cdiv = lambda a, b: -(-a // b)


@pytest.fixture(autouse=True)
def _in_python(monkeypatch):
    names = {"cdiv": cdiv, "where": lambda c, a, b: a if c else b}
    monkeypatch.setattr(produce_triton, "gl", types.SimpleNamespace(**names))
    for name in ("ROWS", "CONTRACTION", "DENSE", "BK"):
        monkeypatch.setattr(produce_triton, name, getattr(produce_triton, name).value)
    monkeypatch.setattr(produce_triton, "swizzle", tile_scheduler_triton.swizzle.fn)


@pytest.mark.parametrize("panel", [1, 3, 8])
@pytest.mark.parametrize("programs", [1, 5, 132])
def test_consumers_know_where_a_dense_tile_is(panel, programs):
    """Without the producer, from one tile of a program to its next."""
    skip, place = tile_scheduler_triton.skip_panels.fn, tile_scheduler_triton.place_in_panel.fn
    swizzle = tile_scheduler_triton.swizzle.fn
    for num_i, num_j in ((1, 1), (8, 3), (17, 5), (2, 40)):
        for first in range(programs):
            t, panel_row = skip(first, 0, num_i, num_j, panel)
            for number in range(first, num_i * num_j, programs):
                assert place(t, panel_row, num_i, panel) == swizzle(number, num_i, num_j, panel)
                t, panel_row = skip(t + programs, panel_row, num_i, num_j, panel)
            assert panel_row >= num_i


@pytest.mark.parametrize(("bm", "bn"), HOPPER_TILES)
@pytest.mark.parametrize(("M", "N"), [(1, 1), (333, 200), (128, 64), (400, 522)])
def test_every_number_is_in_one_tile(bm, bn, M, N):
    """Of a dense result; and no tile has columns of two blocks of scales."""
    written, count = np.zeros((M, N), int), cdiv(M, bm) * cdiv(N, bn)
    for t in range(count):
        fetched = produce_triton.fetch_tile.fn(t, count, None, 1, 1, M, N, bm, bn, 3, DENSE)
        group, row, end, col, first_k, steps = produce_triton.place_tile.fn(fetched, 1, M, 1000, DENSE)
        assert (group, end, first_k, steps) == (0, M, 0, 8)
        assert produce_triton.operand_rows.fn(group, row, col, M, N, DENSE) == (row, col)
        written[row : row + bm, col : col + bn] += 1
        assert bn > 128 or (col + bn - 1) // 128 == col // 128
    assert (written == 1).all()


@pytest.mark.parametrize(("scales", "turns"), [("OUTER", 2), ("BLOCK", 1)])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_when_a_slot_of_scales_is_written_again(scales, turns, stages, monkeypatch):
    """Producer and consumer agree. OUTER's scales may be read after their stage is released: once more around."""
    monkeypatch.setattr(produce_triton, "OUTER", produce_triton.OUTER.value)
    number = getattr(produce_triton, scales)
    slot_of, last = produce_triton.scale_slot.fn, {}
    ours, theirs = (0, 0), (0, 1)  # stage and phase of the consumer, of the producer
    for step in range(4 * stages):
        slot = slot_of(*ours, stages, getattr(number, "value", number))
        assert slot == slot_of(theirs[0], 1 - theirs[1], stages, getattr(number, "value", number))
        assert 0 <= slot < turns * stages
        assert step - last.get(slot, step - turns * stages) == turns * stages
        last[slot] = step
        ours, theirs = (advance.fn(*at, stages) for at in (ours, theirs))
