"""Where the Hopper kernel's tiles read and write: the producer's arithmetic on Python's numbers."""

import types

import numpy as np
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

from jaxops._lib import tile_scheduler_triton
from jaxops.ops.fp8_matmul import produce_triton
from jaxops.ops.fp8_matmul.gemm_triton import schedule_parts
from jaxops.ops.fp8_matmul.plan import HOPPER_TILES

DENSE, CONTRACTION = 0, 2
cdiv = lambda a, b: -(-a // b)


@pytest.fixture(autouse=True)
def _in_python(monkeypatch):
    """A pointer is an offset into the work list, which `load` reads."""
    names = {"cdiv": cdiv, "load": lambda at: at[0][at[1]], "where": lambda c, a, b: a if c else b}
    monkeypatch.setattr(produce_triton, "gl", types.SimpleNamespace(**names))
    for name in ("ROWS", "CONTRACTION", "DENSE", "BK"):
        monkeypatch.setattr(produce_triton, name, getattr(produce_triton, name).value)
    monkeypatch.setattr(produce_triton, "swizzle", tile_scheduler_triton.swizzle.fn)


class Pointer(tuple):
    """(array, offset)."""

    def __add__(self, offset):
        return Pointer((self[0], self[1] + offset))


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


def tiles_of(M, K, N, bm, bn, parts):
    """Of each tile: group; first row, end and first column in C; first row in A, in B; first K step, K steps; its first
    scale in 128x128 blocks of B."""
    count = parts * cdiv(M, bm) * cdiv(N, bn)
    kind = CONTRACTION if parts > 1 else DENSE
    schedule = Pointer((schedule_parts(K, parts), 0)) if parts > 1 else None
    for t in range(count):
        fetched = produce_triton.fetch_tile.fn(t, count, schedule, parts, parts, M, N, bm, bn, 3, kind)
        group, row, end, col, first_k, steps = produce_triton.place_tile.fn(fetched, parts, M, K, kind)
        at = produce_triton.operand_rows.fn(group, row, col, M, N, kind)
        scale = produce_triton.first_scale.fn(group, col, first_k, N, K, kind)
        yield group, row, end, col, *at, first_k, steps, scale


@pytest.mark.parametrize(("bm", "bn"), HOPPER_TILES)
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize(("M", "K", "N"), [(1, 1, 1), (333, 1000, 200), (128, 1024, 64), (400, 640, 522)])
def test_every_product_is_summed_once(bm, bn, parts, M, K, N):
    """Each number of C adds each K step once, of its own row of A, column of B, and block's scale."""
    steps, blocks = cdiv(K, 128), cdiv(N, 128)
    summed, written = np.zeros((M, N, steps), int), np.zeros((parts * M, N), int)
    for group, row, end, col, a_row, b_row, first_k, count, scale in tiles_of(M, K, N, bm, bn, parts):
        assert end == (group + 1) * M
        assert row == group * M + a_row
        assert col == b_row
        assert col % bn == 0
        written[row : min(row + bm, end), col : col + bn] += 1
        summed[a_row : a_row + bm, col : col + bn, first_k : first_k + count] += 1
        assert first_k + max(count, 1) <= steps  # also of a part without steps, whose first scale is loaded
        if bn <= 128:  # wider tiles have no block scales
            assert (col + bn - 1) // 128 == col // 128
            assert divmod(scale, steps) == (col // 128, first_k)
            assert scale + max(count, 1) <= blocks * steps
    assert (summed == 1).all()
    assert (written == 1).all()


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_parts_are_groups_of_columns(parts):
    """As the work list of a contraction: first and end are columns, of whole steps; ascending and without gaps."""
    for steps in range(1, 20):
        number, first, end, first_k, count, counter = schedule_parts(128 * steps - 5, parts).reshape(6, parts).tolist()
        assert number == list(range(parts))
        assert [128 * k for k in first_k] == first
        assert (set(count), set(counter)) == ({parts}, {0})
        spans = [(lo, hi) for lo, hi in zip(first, end, strict=True) if lo < hi]
        assert [lo for lo, _ in spans] == [0, *(hi for _, hi in spans[:-1])]
        assert spans[-1][1] == 128 * steps
        assert all(hi - lo <= 128 * cdiv(steps, parts) for lo, hi in spans)
