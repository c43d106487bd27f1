"""The work lists that products read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.pallas.launch_pallas import launch
from jaxops._lib.pallas.schedule_pallas import schedule_groups, schedule_rows, tile_of, work_of_rows
from jaxops._lib.ragged.tiling import tile_bound
from jaxops._lib.ragged.work_list import COLUMNS

pytestmark = pytest.mark.versions


def columns(schedule) -> np.ndarray:
    return np.asarray(schedule).reshape(COLUMNS, -1)


def test_rows():
    """Rows before the groups, two groups with an empty one between, rows behind; then unused tiles, without rows."""
    group, start, end, number, total, zeros = columns(
        schedule_rows(jnp.array([5, 75, 75, 90], jnp.int32), 100, 64, True)
    )
    assert total.tolist() == [5] * len(total)
    assert not zeros.any()
    assert [x[:5].tolist() for x in (group, start, end, number)] == [
        [3, 0, 0, 2, 3],
        [0, 5, 69, 75, 90],
        [5, 69, 75, 90, 100],
        [-1, 0, 1, 2, -1],
    ]
    np.testing.assert_array_equal(start[5:], end[5:])


def test_rows_of_some_runs():
    """Of four groups, the second and the third, and the rows before all. The count: tiles up to each span's end."""
    offsets = jnp.array([5, 75, 90, 90, 100], jnp.int32)
    group, start, end, _, ends, _ = columns(schedule_rows(offsets, 120, 8, True, ((0, 1), (2, 4))))
    assert [x[:4].tolist() for x in (group, start, end)] == [[4, 1, 1, 4], [0, 75, 83, 0], [5, 83, 90, 0]]
    assert ends[:4].tolist() == [1, 3, 3, 3]
    (ends, *_) = (columns(schedule_rows(offsets, 120, 8, True, ((0, 2), (2, 3), (3, 6))))[4],)
    assert ends[:4].tolist() == [1 + 9, 1 + 9 + 2, 1 + 9 + 2 + 2 + 3, 1 + 9 + 2 + 2 + 3]


def test_no_more_tiles_than_entries():
    """Whatever the offsets: here each of fifteen groups has all rows."""
    for spans in ((), ((0, 8), (8, 31))):
        schedule = columns(schedule_rows(jnp.array([0, 100] * 15, jnp.int32), 100, 8, True, spans))
        assert schedule[4].max() <= schedule.shape[1]
        assert schedule[2].max() <= 100


@pytest.mark.parametrize("M", [100, 2049], ids=["found", "listed"])
@pytest.mark.parametrize("bm", [1, 16])
def test_a_program_finds_its_tile(bm, M):
    """Few rows have no list: each program's tile is the entry that the list would have."""
    count = tile_bound(M, 3, bm)

    def kernel(work_ref, out_ref):
        for i, number in enumerate(tile_of(work_ref, pl.program_id(0), 3, M, bm)):
            plgpu.store(out_ref.at[jnp.int32(i), pl.program_id(0)], number)

    @jax.jit
    def both(offsets):
        work, out = work_of_rows(offsets, M, bm, True), jax.ShapeDtypeStruct((3, count), jnp.int32)
        assert (work is offsets) == (M == 100)
        found = launch(kernel, work, out=out, grid=(count,), warps=4, interpret=True, name="find", flops=0)
        return found, schedule_rows(offsets, M, bm, True)

    for offsets in ((5, 75, 75, 90), (0, 0, 100, 100), (-3, 30, 20, 10_000)):
        found, schedule = both(np.array(offsets, np.int32))
        np.testing.assert_array_equal(found, columns(schedule)[:3, :count])


def test_more_groups_than_a_program_sorts():
    """A program has 16 of 100 groups, the last block fewer. All groups, largest first; the tiles before each group."""
    G = 100
    sizes = np.random.default_rng(0).integers(0, 90, G)
    offsets = np.concatenate([[3], 3 + np.cumsum(sizes)])
    M = int(offsets[-1]) + 5
    group, start, end, first, *_ = (
        x[:G] for x in columns(schedule_groups(jnp.asarray(offsets, jnp.int32), M, True, 64))
    )
    np.testing.assert_array_equal(group, np.argsort(-sizes, kind="stable"))
    np.testing.assert_array_equal([start, end], [offsets[:-1][group], offsets[1:][group]])
    np.testing.assert_array_equal(first, np.concatenate([[0], np.cumsum(-(-sizes // 64))])[group])

    tiles = -(-sizes // 64)
    group, start, end, _, total, _ = columns(schedule_rows(jnp.asarray(offsets, jnp.int32), M, 64, True))
    assert total[0] == tiles.sum() + 2, "and a tile before the groups, and one behind"
    np.testing.assert_array_equal(group[: total[0]], [G, *np.repeat(np.arange(G), tiles), G])
    assert (end - start)[: total[0]].sum() == M


def test_groups_in_parts():
    """The parts stay in order, an empty one too; each has its largest group first."""
    offsets = jnp.array([0, 3, 10, 10, 50, 52, 99], jnp.int32)
    group, start, end, *_ = columns(schedule_groups(offsets, 100, True, parts=(2, 2, 5)))
    assert group[:6].tolist() == [1, 0, 3, 4, 2, 5]
    np.testing.assert_array_equal(start[:6], np.asarray(offsets)[group[:6]])
    np.testing.assert_array_equal(end[:6], np.asarray(offsets)[group[:6] + 1])


def test_triton_kernels_compile():
    pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")
    from jaxops._lib.gluon import schedule_triton
    from tests.gluon import compiled

    offsets = jax.ShapeDtypeStruct((9,), jnp.int32)
    for spans, parts in (((), ()), (((0, 4), (4, 10)), (3,))):

        def both(offsets, spans=spans, parts=parts):
            return (
                schedule_triton.schedule_rows(offsets, 1000, 128, spans, zeros=300)[0],
                schedule_triton.schedule_groups(offsets, 1000, parts)[0],
                schedule_triton.schedule_parts(offsets, 1000, 4, zeros=300)[0],
            )

        names = [kernel.name for kernel in compiled(both, offsets, work_lists=True)]
        assert names == ["schedule_rows_kernel", "schedule_groups_kernel", "schedule_parts_kernel"]


@pytest.mark.hopper
@pytest.mark.parametrize("seed", range(4))
def test_tritons_lists_are_pallas_ones(seed, monkeypatch):
    """Also of several programs, of offsets that break the contract, and with zeros behind the list."""
    from jaxops._lib.gluon import schedule_triton

    monkeypatch.setattr(schedule_triton, "_ELEMENTS", 64)
    rng = np.random.default_rng(seed)
    M, G = int(rng.integers(1, 300)), int(rng.integers(1, 12))
    wild = rng.integers(-9, M + 9, G + 1)
    offsets = jnp.asarray(wild if seed == 3 else np.sort(wild.clip(0, M)), jnp.int32)
    spans, parts, tiles = ((0, G // 2 + 1), (G // 2 + 1, G + 2)), (G // 2,), tile_bound(M, G, 16)
    for (schedule, entries), want, count, room in (
        (schedule_triton.schedule_rows(offsets, M, 16, zeros=701), schedule_rows(offsets, M, 16, True), tiles, 701),
        (schedule_triton.schedule_rows(offsets, M, 16, spans), schedule_rows(offsets, M, 16, True, spans), tiles, 0),
        (schedule_triton.schedule_groups(offsets, M, zeros=701), schedule_groups(offsets, M, True), G, 701),
        (schedule_triton.schedule_groups(offsets, M, parts), schedule_groups(offsets, M, True, parts=parts), G, 0),
    ):
        found, zeros = np.split(np.asarray(schedule), [COLUMNS * entries])
        same = [0, 1, 2, 4, 5] if count == tiles else range(COLUMNS)  # Triton's kernels read places in panels instead
        np.testing.assert_array_equal(columns(found)[same, :count], columns(want)[same, :count])
        assert zeros.size >= room
        assert not zeros.any()
