"""Grouped matmul for Hopper, in Gluon: one kernel for all three passes, with TMA loads and stores, one producer warp and two consumers of four warps.

The consumers share a tile, each with half of its rows, or take turns: then each has a tile of its own, and one stores while the other multiplies, which
pays where a sum is short. Operands are read as they lie in memory: the tensor core takes both of either order, so no pass copies a transpose.
"""

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from jaxops._lib.device import current_device
from jaxops._lib.hopper_triton import advance, number_taken, panel_order, result_buffers, store, take_number, tile_at, tile_layout, window
from jaxops._lib.launch_triton import OutTile, Scratch, TensorDescriptor, row_windows, triton_call
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.schedule_pallas import COLUMNS, schedule_groups, schedule_rows
from jaxops._lib.tiling import tile_bound
from jaxops.ops.grouped_matmul.plan import Tiles

# What the groups cut: A's and C's rows, each group with a B of its own; or the rows over which is summed, each group with a C of its own.
ROWS, CONTRACTION = gl.constexpr(0), gl.constexpr(1)
BK = gl.constexpr(64)


@gluon.jit
def _count(schedule, entries, G, M, N, BM: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr):
    """Row tiles (of all groups, as they lie; or of one), and tiles in all."""
    num_i = gl.load(schedule + 4 * entries) if KIND == ROWS else gl.cdiv(M, BM)
    tiles = num_i * gl.cdiv(N, BN)
    return num_i, tiles if KIND == ROWS else tiles * G


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
def _tell(facts, s, group, row, end, col, steps):
    """To the consumers, beside a tile's first step."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(5):
        facts.index(5 * s + i).store(gl.full([1], (group, row, end, col, steps)[i], gl.int32, ONE))


@gluon.jit
def _told(facts, s):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    group = facts.index(5 * s).load(ONE).item()
    row = facts.index(5 * s + 1).load(ONE).item()
    end = facts.index(5 * s + 2).load(ONE).item()
    col = facts.index(5 * s + 3).load(ONE).item() // 8 * 8  # as it is: so the compiler sees whole 16 bytes
    return group, row, end, col, facts.index(5 * s + 4).load(ONE).item()


@gluon.jit
def _produce(
    made, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr
):
    a_desc, b_desc, schedule, facts, a_bufs, b_bufs, full, empty, entries, G, M, N, K = made
    PART: gl.constexpr = BM // PARTS
    num_i, tiles = _count(schedule, entries, G, M, N, BM, BN, KIND)
    s = 0
    phase = 1
    mended = 0
    # Tiles are taken one by one as programs get free: those of small groups, and of programs that the card holds back, take less than others.
    t = gl.program_id(0)
    while t < tiles:
        number = take_number(schedule + 5 * entries)
        group, row, end, col, first, size = _locate(t, schedule, entries, num_i, G, M, N, K, BM, BN, PANEL, KIND)
        mbarrier.wait(empty.index(s), phase)
        # What lies outside the groups, and an empty group's result, is the sum of one step of zeros: so TMA fills what lies past K, or a window's end.
        told = gl.where(size > 0, group, -1)
        steps = gl.cdiv(max(size, 1), BK)
        if KIND == ROWS:
            _tell(facts, s, told, row, end, col, steps)
            first = gl.where(size > 0, 0, K)
        else:
            _tell(facts, s, told, row + group * M, end + group * M, col, steps)
        for at in range(first, first + steps * BK, BK):
            mbarrier.wait(empty.index(s), phase)
            # The last rows of a sum are a group's last ones; the next group's come as zeros, but for groups that end within the first BK rows of all:
            # those are mended before the consumers see them.
            left = min(first + size - at, BK)
            mend = KIND == CONTRACTION and left < BK and at + left < BK
            arrived = full.index(STAGES if mend else s)
            mbarrier.expect(arrived, PARTS * a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
            if KIND == ROWS:
                for i in gl.static_range(PARTS):
                    tma.async_load(a_desc, [row + i * PART, at], arrived, a_bufs.index(PARTS * s + i))
                if TRANSPOSED:
                    tma.async_load(b_desc, [group * N + col, at], arrived, b_bufs.index(s))
                else:
                    tma.async_load(b_desc, [group, at, col], arrived, b_bufs.index(s).reshape([1, BK, BN]))
            else:
                start, inside = window(at, at + left, BK)
                for i in gl.static_range(PARTS):
                    tma.async_load(a_desc, [start, inside, row + i * PART], arrived, a_bufs.index(PARTS * s + i).reshape([1, BK, PART]))
                tma.async_load(b_desc, [start, inside, col], arrived, b_bufs.index(s).reshape([1, BK, BN]))
            if mend:
                mbarrier.wait(arrived, mended)
                mended ^= 1
                for i in gl.static_range(PARTS):
                    _zero_rows(a_bufs.index(PARTS * s + i), left)
                _zero_rows(b_bufs.index(s), left)
                fence_async_shared()
                mbarrier.arrive(full.index(s), count=1)
            s, phase = advance(s, phase, STAGES)
        t = gl.num_programs(0) + number_taken(number)
    for _ in gl.static_range(2 // PARTS):  # a tile of no steps is the last one, of each that takes turns
        mbarrier.wait(empty.index(s), phase)
        _tell(facts, s, -1, 0, 0, 0, 0)
        mbarrier.arrive(full.index(s), count=1)
        s, phase = advance(s, phase, STAGES)


@gluon.jit
def _place(places, WHICH: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return places.index(2 * WHICH).load(ONE).item(), places.index(2 * WHICH + 1).load(ONE).item()


@gluon.jit
def _hand_over(turns, places, s, phase, TO: gl.constexpr):
    """The next turn, with the place in the ring where it starts."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    places.index(2 * TO).store(gl.full([1], s, gl.int32, ONE))
    places.index(2 * TO + 1).store(gl.full([1], phase, gl.int32, ONE))
    mbarrier.arrive(turns.index(TO), count=1)


@gluon.jit
def _sum(
    acc, a_bufs, b_bufs, full, empty, turns, places, steps, s, phase, WHICH: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    TRANSPOSED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """acc + A @ B over all steps, one at least; one is multiplied while the one before is given back."""
    PART: gl.constexpr = WHICH if PARTS > 1 else 0
    for k in range(steps):
        mbarrier.wait(full.index(s), phase)
        a = a_bufs.index(PARTS * s + PART)
        b = b_bufs.index(s)
        if KIND == CONTRACTION:
            a = a.permute((1, 0))
        if TRANSPOSED:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((s + STAGES - 1) % STAGES), count=1, pred=k > 0)
        s, phase = advance(s, phase, STAGES)
    if PARTS == 1:
        _hand_over(turns, places, s, phase, 1 - WHICH)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((s + STAGES - 1) % STAGES), count=1)
    return acc, s, phase


@gluon.jit
def _add_bias(acc, bias, group, col, N, MMA: gl.constexpr):
    cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, MMA))
    return acc + gl.load(bias + group * N + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _before(c_ptr, row, end, col, N, SHAPE: gl.constexpr, MMA: gl.constexpr):
    """What stands in C, which the sum starts from."""
    pointers, mask = tile_at(c_ptr, row, end, col, N, SHAPE, MMA, True)
    return gl.load(pointers, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _consume(
    used, WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr,
    KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    bias, c_desc, c_ptr, facts, places, a_bufs, b_bufs, c_bufs, full, empty, turns, N = used
    PART: gl.constexpr = WHICH if PARTS > 1 else 0
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    s = 0
    phase = 0
    waited = 1 - WHICH  # the first consumer has the first turn
    more = True
    while more:
        if PARTS == 1:
            # The place in the ring comes with the turn. A barrier tells a phase only from the next: who came early would take an old filling for its own.
            mbarrier.wait(turns.index(WHICH), waited)
            waited ^= 1
            s, phase = _place(places, WHICH)
        mbarrier.wait(full.index(s), phase)
        group, row, end, col, steps = _told(facts, s)
        row += PART * (BM // PARTS)
        more = steps > 0
        if row < end:
            SHAPE: gl.constexpr = [BM // PARTS, BN]
            acc = _before(c_ptr, row, end, col, N, SHAPE, MMA) if ACCUMULATE else gl.zeros(SHAPE, gl.float32, MMA)
            acc, s, phase = _sum(acc, a_bufs, b_bufs, full, empty, turns, places, steps, s, phase, WHICH, STAGES, KIND, TRANSPOSED, PARTS)
            if bias is not None and group >= 0:  # rows outside stay zero
                acc = _add_bias(acc, bias, group, col, N, MMA)
            if not ACCUMULATE or group >= 0:  # else an empty group's, which stays as it is, to the bit
                store(acc, c_desc, c_ptr, c_bufs.index(WHICH), row, end, col, N, MMA, False, True)
        elif PARTS == 1:  # no more tiles
            s, phase = advance(s, phase, STAGES)
            _hand_over(turns, places, s, phase, 1 - WHICH)
        else:  # no rows: this consumer's half of what is loaded is only given back
            for _ in range(steps):
                mbarrier.wait(full.index(s), phase)
                mbarrier.arrive(empty.index(s), count=1)
                s, phase = advance(s, phase, STAGES)
    tma.store_wait(0)


@gluon.jit
def grouped_gemm_kernel(
    a_desc, b_desc, bias, schedule, c_desc, c_ptr, entries, G, M, N, K,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):  # fmt: skip
    PART: gl.constexpr = BM // PARTS
    A_SHAPE: gl.constexpr = [PART, BK] if KIND == ROWS else [BK, PART]
    B_SHAPE: gl.constexpr = [BN, BK] if TRANSPOSED else [BK, BN]
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(A_SHAPE, a_desc.dtype)
    B_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(B_SHAPE, b_desc.dtype)
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [PARTS * STAGES, A_SHAPE[0], A_SHAPE[1]], A_LAYOUT)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, B_SHAPE[0], B_SHAPE[1]], B_LAYOUT)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    facts = gl.allocate_shared_memory(gl.int32, [5 * STAGES, 1], FLAT)
    places = gl.allocate_shared_memory(gl.int32, [4, 1], FLAT)
    for i in gl.static_range(4):
        places.index(i).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
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
    made = (a_desc, b_desc, schedule, facts, a_bufs, b_bufs, full, empty, entries, G, M, N, K)
    used = (bias, c_desc, c_ptr, facts, places, a_bufs, b_bufs, c_bufs, full, empty, turns, N)
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
    a = row_windows(lhs, (64, tiles.part), tile_layout(lhs.dtype, (1, 64, tiles.part)))
    b = row_windows(dout, (64, tiles.bn), tile_layout(dout.dtype, (1, 64, tiles.bn)))
    schedule = schedule_groups(offsets, length, False)
    out = out_struct((G * M, N), out_dtype, like=lhs)
    accumulator = None if accumulator is None else accumulator.reshape(G * M, N)
    sizes = {"G": G, "M": M, "N": N, "K": 0}
    return _call(a, b, None, schedule, accumulator, out, G * -(-M // tiles.bm), tiles, sizes, "wgrad", TRANSPOSED=False).reshape(G, M, N)


def _call(a, b, bias, schedule, accumulator, out, row_tiles: int, tiles: Tiles, sizes: dict[str, int], name: str, **constants) -> jax.Array:
    store_from = OutTile((tiles.part, tiles.bn), tile_layout(out.dtype, (1, tiles.part, tiles.bn)), accumulator)
    count = row_tiles * -(-sizes["N"] // tiles.bn)
    return triton_call(
        a, b, bias, Scratch(schedule), store_from, kernel=grouped_gemm_kernel, out_type=out, grid=min(current_device().cores, count),
        name=f"grouped_matmul_{name}", entries=schedule.shape[0] // COLUMNS, **sizes, BM=tiles.bm, BN=tiles.bn, STAGES=tiles.stages, PANEL=tiles.panel,
        KIND=(CONTRACTION if name == "wgrad" else ROWS).value, PARTS=tiles.bm // tiles.part, ACCUMULATE=accumulator is not None, **constants,
    )  # fmt: skip
