"""Grouped matmul for Hopper, in Gluon: one kernel for all three passes, with TMA loads and stores, one producer warp and two consumers of four warps.

The consumers share a tile, each with half of its rows, or take turns: then each has a tile of its own, and one stores while the other multiplies, which
pays where a sum is short. Operands are read as they lie in memory: the tensor core takes both of either order, so no pass copies a transpose.
"""

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from jaxops._lib.device import current_device
from jaxops._lib.hopper_triton import advance, panel_order, result_buffers, store, tile_layout
from jaxops._lib.launch_triton import OutTile, TensorDescriptor, triton_call
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.schedule_pallas import COLUMNS, schedule_groups, schedule_rows
from jaxops._lib.tiling import tile_bound
from jaxops.ops.grouped_matmul.plan import Tiles

# What the groups cut: A's and C's rows, each group with a B of its own; or the rows over which is summed, each group with a C of its own.
ROWS, CONTRACTION = gl.constexpr(0), gl.constexpr(1)
BK = gl.constexpr(64)


@gluon.jit
def _locate(t, schedule, entries, num_i, G, M, N, K, BM: gl.constexpr, BN: gl.constexpr, PANEL: gl.constexpr, KIND: gl.constexpr):
    """Of tile t: group, first row, end of the group's rows, first column, where its sum starts, over how much it goes (nothing outside the groups)."""
    num_j = gl.cdiv(N, BN)
    if KIND == ROWS:
        i, j = panel_order(t, num_i, num_j, PANEL)
        group = gl.load(schedule + i)
        return min(group, G - 1), gl.load(schedule + entries + i), gl.load(schedule + 2 * entries + i), j * BN, 0, gl.where(group < G, K, 0)
    rank = t // (num_i * num_j)
    i, j = panel_order(t % (num_i * num_j), num_i, num_j, PANEL)
    first = gl.load(schedule + entries + rank)
    return gl.load(schedule + rank), i * BM, M, j * BN, first, gl.load(schedule + 2 * entries + rank) - first


@gluon.jit
def _row_tiles(schedule, entries, M, BM: gl.constexpr, KIND: gl.constexpr):
    """Of all groups, as they lie; or of one."""
    return gl.load(schedule + 4 * entries) if KIND == ROWS else gl.cdiv(M, BM)


@gluon.jit
def _zero_rows(buf, first):
    """Zeroes the rows of a buffer of 64-column pieces from `first` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    for i in gl.static_range(buf.shape[0] // 8):
        if first < 8 * i + 8:
            for j in gl.static_range(buf.shape[1] // 64):
                piece = buf.slice(8 * i, 8, dim=0).slice(64 * j, 64, dim=1)
                value = piece.load(LAYOUT)
                piece.store(gl.where(rows + 8 * i < first, value, gl.zeros_like(value)))


@gluon.jit
def _produce(
    made, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr
):
    a_desc, b_desc, schedule, a_bufs, b_bufs, full, empty, entries, G, M, N, K = made
    PART: gl.constexpr = BM // PARTS
    num_i = _row_tiles(schedule, entries, M, BM, KIND)
    tiles = num_i * gl.cdiv(N, BN) * (G if KIND == CONTRACTION else 1)
    s = 0
    phase = 1
    mended = 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, row, _end, col, first, size = _locate(t, schedule, entries, num_i, G, M, N, K, BM, BN, PANEL, KIND)
        for k in range(0, size, BK):
            mbarrier.wait(empty.index(s), phase)
            # The last rows of a sum may be a neighbour's: what came by TMA is then mended before the consumers see it.
            mend = KIND == CONTRACTION and k + BK > size
            arrived = full.index(STAGES if mend else s)
            mbarrier.expect(arrived, PARTS * a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
            for i in gl.static_range(PARTS):
                if KIND == ROWS:
                    tma.async_load(a_desc, [row + i * PART, k], arrived, a_bufs.index(PARTS * s + i))
                else:
                    tma.async_load(a_desc, [first + k, row + i * PART], arrived, a_bufs.index(PARTS * s + i))
            if KIND == CONTRACTION:
                tma.async_load(b_desc, [first + k, col], arrived, b_bufs.index(s))
            elif TRANSPOSED:
                tma.async_load(b_desc, [group * N + col, k], arrived, b_bufs.index(s))
            else:
                tma.async_load(b_desc, [group, k, col], arrived, b_bufs.index(s))
            if mend:
                mbarrier.wait(arrived, mended)
                mended ^= 1
                for i in gl.static_range(PARTS):
                    _zero_rows(a_bufs.index(PARTS * s + i), size - k)
                _zero_rows(b_bufs.index(s), size - k)
                fence_async_shared()
                mbarrier.arrive(full.index(s), count=1)
            s, phase = advance(s, phase, STAGES)


@gluon.jit
def _sum(
    acc, a_bufs, b_bufs, full, empty, other, steps, s, phase, PART, STAGES: gl.constexpr, KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr
):
    """acc + A @ B over all steps; one step is multiplied while the one before is given back. other: behind this barrier the other consumer waits its turn."""
    for k in range(steps):
        mbarrier.wait(full.index(s), phase)
        a = a_bufs.index(PARTS * s + PART)
        b = b_bufs.index(s)
        if KIND == CONTRACTION:
            a = a.permute((1, 0))
        elif TRANSPOSED:
            b = b.permute((1, 0))
        else:
            b = b.reshape([b.shape[1], b.shape[2]])
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((s + STAGES - 1) % STAGES), count=1, pred=k > 0)
        s, phase = advance(s, phase, STAGES)
    if PARTS == 1:
        mbarrier.arrive(other, count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((s + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    return acc, s, phase


@gluon.jit
def _add_bias(acc, bias, group, col, N, MMA: gl.constexpr):
    cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, MMA))
    return acc + gl.load(bias + group * N + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _add_result(acc, c_ptr, row, end, col, N, MMA: gl.constexpr):
    """acc and what stands in C."""
    rows = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, MMA))
    cols = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, MMA))
    corner = c_ptr + (gl.cast(row, gl.int64) * N + col)
    mask = (rows < end - row)[:, None] & (cols < N - col)[None, :]
    return acc + gl.load(corner + (rows[:, None] * N + cols[None, :]), mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _consume(
    used, WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr,
    KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    bias, schedule, c_desc, c_ptr, a_bufs, b_bufs, c_bufs, full, empty, turns, entries, G, M, N, K = used
    PART: gl.constexpr = WHICH if PARTS > 1 else 0
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    num_i = _row_tiles(schedule, entries, M, BM, KIND)
    tiles = num_i * gl.cdiv(N, BN) * (G if KIND == CONTRACTION else 1)
    s = 0
    phase = 0
    turn = 0
    waited = 1 - WHICH  # the first consumer has the first turn
    # What stands in global memory is read a tile ahead, so that its latency lies beside the products of the tile before.
    group, row, end, col, _, size = _locate(gl.program_id(0), schedule, entries, num_i, G, M, N, K, BM, BN, PANEL, KIND)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        following = min(t + gl.num_programs(0), tiles - 1)
        next_group, next_row, next_end, next_col, _, next_size = _locate(following, schedule, entries, num_i, G, M, N, K, BM, BN, PANEL, KIND)
        steps = gl.cdiv(size, BK)
        row += PART * (BM // PARTS)
        mine = turn == WHICH if PARTS == 1 else row < end
        if mine:
            if PARTS == 1:
                # Also because a barrier tells a phase only from the next: who comes too early would take an old filling of its buffer for its own.
                mbarrier.wait(turns.index(WHICH), waited)
                waited ^= 1
            acc = gl.zeros([BM // PARTS, BN], gl.float32, MMA)
            acc, s, phase = _sum(acc, a_bufs, b_bufs, full, empty, turns.index(1 - WHICH), steps, s, phase, PART, STAGES, KIND, TRANSPOSED, PARTS)
            if KIND == CONTRACTION:
                row += group * M
                end += group * M
            if bias is not None and size > 0:  # rows outside stay zero
                acc = _add_bias(acc, bias, group, col, N, MMA)
            if ACCUMULATE:
                if size > 0:  # an empty group's stay as they are, to the bit
                    acc = _add_result(acc, c_ptr, row, end, col, N, MMA)
                    store(acc, c_desc, c_ptr, c_bufs.index(WHICH), row, end, col, N, MMA, False, True)
            else:
                store(acc, c_desc, c_ptr, c_bufs.index(WHICH), row, end, col, N, MMA, False, True)
        elif PARTS == 1:  # the other consumer's
            phase ^= (s + steps) // STAGES & 1
            s = (s + steps) % STAGES
        else:  # no rows: this consumer's half of what is loaded is only given back
            for _ in range(steps):
                mbarrier.wait(full.index(s), phase)
                mbarrier.arrive(empty.index(s), count=1)
                s, phase = advance(s, phase, STAGES)
        turn ^= 1
        group, row, end, col, size = next_group, next_row, next_end, next_col, next_size
    tma.store_wait(0)


@gluon.jit
def grouped_gemm_kernel(
    a_desc, b_desc, bias, schedule, c_desc, c_ptr, entries, G, M, N, K,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):  # fmt: skip
    PART: gl.constexpr = BM // PARTS
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [PARTS * STAGES, PART, BK] if KIND == ROWS else [PARTS * STAGES, BK, PART], a_desc.layout)
    WIDE: gl.constexpr = [STAGES, BK, BN] if KIND == CONTRACTION else [STAGES, 1, BK, BN]
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, BK] if TRANSPOSED else WIDE, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=PARTS)
    mbarrier.init(full.index(STAGES), count=1)  # of what is mended
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    c_bufs = result_buffers(c_ptr, 2, BM // PARTS, BN)
    made = (a_desc, b_desc, schedule, a_bufs, b_bufs, full, empty, entries, G, M, N, K)
    used = (bias, schedule, c_desc, c_ptr, a_bufs, b_bufs, c_bufs, full, empty, turns, entries, G, M, N, K)
    gl.warp_specialize([
        (_consume, (used, 0, BM, BN, STAGES, PANEL, KIND, TRANSPOSED, PARTS, ACCUMULATE)),
        (_consume, (used, 1, BM, BN, STAGES, PANEL, KIND, TRANSPOSED, PARTS, ACCUMULATE)),
        (_produce, (made, BM, BN, STAGES, PANEL, KIND, TRANSPOSED, PARTS)),
    ], [4, 1], [224, 56])  # fmt: skip


def fwd_triton(lhs, rhs, bias, offsets, *, transpose_rhs: bool, tiles: Tiles, out_dtype) -> jax.Array:
    """As `fwd_pallas`; bfloat16 or float16, K and N multiples of 8."""
    (M, K), G, N = lhs.shape, rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    a = TensorDescriptor.from_array(lhs, (tiles.part, 64), layout=tile_layout(lhs.dtype, (tiles.part, 64)))
    if transpose_rhs:
        b = TensorDescriptor.from_array(rhs.reshape(G * N, K), (tiles.bn, 64), layout=tile_layout(rhs.dtype, (tiles.bn, 64)))
    else:  # of three dimensions: past K come zeros, not the next group's rows
        b = TensorDescriptor.from_array(rhs, (1, 64, tiles.bn), layout=tile_layout(rhs.dtype, (1, 64, tiles.bn)))
    schedule = schedule_rows(offsets, M, tiles.bm, False)
    out = out_struct((M, N), out_dtype, like=lhs)
    sizes = {"G": G, "M": M, "N": N, "K": K}
    return _call(a, b, bias, schedule, None, out, tile_bound(M, G, tiles.bm), tiles, sizes, "fwd" if not transpose_rhs else "dgrad", TRANSPOSED=transpose_rhs)


def wgrad_triton(lhs, dout, accumulator, offsets, *, tiles: Tiles, out_dtype) -> jax.Array:
    """As `wgrad_pallas`; bfloat16 or float16, K and N multiples of 8."""
    (length, M), N, G = lhs.shape, dout.shape[1], offsets.shape[0] - 1
    a = TensorDescriptor.from_array(lhs, (64, tiles.part), layout=tile_layout(lhs.dtype, (64, tiles.part)))
    b = TensorDescriptor.from_array(dout, (64, tiles.bn), layout=tile_layout(dout.dtype, (64, tiles.bn)))
    schedule = schedule_groups(offsets, length, False)
    out = out_struct((G * M, N), out_dtype, like=lhs)
    accumulator = None if accumulator is None else accumulator.reshape(G * M, N)
    sizes = {"G": G, "M": M, "N": N, "K": 0}
    return _call(a, b, None, schedule, accumulator, out, G * -(-M // tiles.bm), tiles, sizes, "wgrad", TRANSPOSED=False).reshape(G, M, N)


def _call(a, b, bias, schedule, accumulator, out, row_tiles: int, tiles: Tiles, sizes: dict[str, int], name: str, **constants) -> jax.Array:
    store_from = OutTile((tiles.part, tiles.bn), tile_layout(out.dtype, (tiles.part, tiles.bn)), accumulator)
    return triton_call(
        a, b, bias, schedule, store_from, kernel=grouped_gemm_kernel, out_type=out, grid=min(current_device().cores, row_tiles * -(-sizes["N"] // tiles.bn)),
        name=f"grouped_matmul_{name}", entries=schedule.shape[0] // COLUMNS, **sizes, BM=tiles.bm, BN=tiles.bn, STAGES=tiles.stages, PANEL=tiles.panel,
        KIND=(CONTRACTION if name == "wgrad" else ROWS).value, PARTS=tiles.bm // tiles.part, ACCUMULATE=accumulator is not None, **constants,
    )  # fmt: skip
