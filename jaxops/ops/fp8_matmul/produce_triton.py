"""The producer of the FP8 products on Hopper, in Gluon: which tiles a program computes, and their loads by TMA into the
stages of the pipeline."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from jaxops._lib.gluon.gemm_triton import GATHER_ARRIVALS, advance
from jaxops._lib.gluon.tile_scheduler_triton import (
    finish_fetch_add,
    place_in_panel_of_group,
    start_fetch_add,
    swizzle,
    write_tile,
)

# One product; row tiles of groups, each group with its own B; one product per group, over the group's part of K.
DENSE, ROWS, CONTRACTION = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# Scales: one per operand; one per row of A and of B; 1x128 blocks of A and 128x128 of B; 1x128 blocks of both.
TENSOR, VECTOR, BLOCK, OUTER = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
BK = gl.constexpr(128)
ROWS_OF_ONE = gl.constexpr(64)  # rows of a tile per consumer


@gluon.jit
def fetch_tile(
    t, tiles, schedule, entries, G, M, N, BM: gl.constexpr, BN: gl.constexpr, PANEL: gl.constexpr, KIND: gl.constexpr
):
    """What `place_tile` needs of tile t; of the last one if there is no tile t. Nothing here waits for the work list:
    that is read while the previous tile is loaded."""
    t = max(min(t, tiles - 1), 0)
    num_j = gl.cdiv(N, BN)
    num_i = gl.cdiv(M, BM)
    if KIND == ROWS:
        i, j = place_in_panel_of_group(t, schedule, entries, num_j)
    else:
        i, j = swizzle(t % (num_i * num_j) if KIND == CONTRACTION else t, num_i, num_j, PANEL)
    group = 0
    start = 0
    end = 0
    first_k = 0
    if KIND != DENSE:
        entry = t // (num_i * num_j) if KIND == CONTRACTION else i
        group = gl.load(schedule + entry)
        start = gl.load(schedule + entries + entry)
        end = gl.load(schedule + 2 * entries + entry)
    if KIND == CONTRACTION:
        first_k = gl.load(schedule + 3 * entries + entry)
    return i * BM, j * BN, group, start, end, first_k


@gluon.jit
def place_tile(fetched, G, M, K, KIND: gl.constexpr):
    """Group; first row in C; end of its rows in C; first column; first K step; number of K steps."""
    row, col, group, start, end, first_k = fetched
    if KIND == ROWS:
        # A tile outside the groups has no steps: it stores its initial accumulator, zeros.
        return min(group, G - 1), start, end, col, 0, gl.where(group < G, gl.cdiv(K, BK), 0)
    if KIND == CONTRACTION:
        return group, group * M + row, group * M + M, col, first_k, gl.cdiv(end - start, BK)
    return 0, row, M, col, 0, gl.cdiv(K, BK)


@gluon.jit
def make_stages(
    a_desc, b_desc, sa, sb,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SCALES: gl.constexpr, PARTS: gl.constexpr,
    GATHERED: gl.constexpr = False,
):  # fmt: skip
    """Shared memory of the stages: operands, of B PARTS boxes; scales, a tile, full and empty barriers.

    GATHERED: for four warps that copy A's rows (gather_triton.py). a_desc and sa are pointers, A has B's dtype, and the
    scales of both consumers' rows lie together.
    """
    CONSUMERS: gl.constexpr = BM // ROWS_OF_ONE
    SLOTS: gl.constexpr = 2 * STAGES if SCALES == OUTER else STAGES
    a_like = b_desc if GATHERED else a_desc
    a_bufs = gl.allocate_shared_memory(a_like.dtype, [CONSUMERS * STAGES, ROWS_OF_ONE, BK], a_like.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [PARTS * STAGES, BN, BK], b_desc.layout)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BOXES: gl.constexpr = SCALES >= BLOCK and not GATHERED
    sa_bufs = gl.allocate_shared_memory(
        gl.float32, [CONSUMERS * SLOTS, 1, sa.block_shape[1]] if BOXES else [STAGES, BM] if GATHERED else [1],
        sa.layout if BOXES else FLAT,
    )  # fmt: skip
    sb_bufs = gl.allocate_shared_memory(
        gl.float32, [SLOTS, 1, BN] if SCALES == OUTER else [PARTS * SLOTS, 1], sb.layout if SCALES == OUTER else FLAT
    )
    tile_bufs = gl.allocate_shared_memory(gl.int32, [5 * STAGES, 1], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=GATHER_ARRIVALS if GATHERED else 1)
        mbarrier.init(empty.index(s), count=CONSUMERS)
    return a_bufs, b_bufs, sa_bufs, sb_bufs, tile_bufs, full, empty


@gluon.jit
def operand_rows(group, row, col, M, N, KIND: gl.constexpr):
    """Where a tile's rows start in A and in B."""
    return row - group * M if KIND == CONTRACTION else row, col + group * N if KIND == ROWS else col


@gluon.jit
def scale_slot(s, round_of_stages, STAGES: gl.constexpr, SCALES: gl.constexpr):
    """Where the scales of stage s are. OUTER: in one of two slots in turn, since a consumer may release a stage before
    its loads of the scales have come back: with one slot TMA wrote the next scales too early, and up to 15 of 80
    launches had wrong sums; a fence before the release took 5 % (H200, 2026-11-26). A slot is written again when the
    stage has been released once more. By then the consumer has used the scales: it issues in order."""
    return s + STAGES * round_of_stages if SCALES == OUTER else s


@gluon.jit
def multiplied_until(row, end, BM: gl.constexpr, KIND: gl.constexpr):
    """The end of a tile's rows that are loaded and multiplied: the tile's, but with two consumers a group's.

    Leaving out the rest with three, too, made the forward of 8 groups of 4,096 rows (K 4,096, N 14,336) 3 % slower
    (H200, 2026-11-26).
    """
    if BM == 2 * ROWS_OF_ONE and KIND != DENSE:
        return end
    else:  # noqa: RET505  # decided at compile time
        return row + BM


@gluon.jit
def produce(
    args, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr,
    KIND: gl.constexpr, SCALES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Loads the operands of this program's tiles, step by step, until there are no more.

    Over groups, whose tiles differ, the next tile is the next one of all programs: an atomic counter behind the work
    list. Else it is every num_programs-th.

    PARTS: a group's B has PARTS * N rows, and a tile those of its columns in each part; with 128x128 scales.
    """
    a_desc, b_desc, sa, sb, schedule, bufs, tiles, entries, G, M, N, K = args
    a_bufs, b_bufs, sa_bufs, sb_bufs, tile_bufs, full, empty = bufs
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    CONSUMERS: gl.constexpr = BM // ROWS_OF_ONE
    A_BYTES: gl.constexpr = a_desc.nbytes_per_cta + (sa.nbytes_per_cta if SCALES >= BLOCK else 0)
    B_BYTES: gl.constexpr = PARTS * b_desc.nbytes_per_cta + (sb.nbytes_per_cta if SCALES == OUTER else 0)
    if KIND == ROWS:  # as many as the groups need; the launch has room for any offsets
        tiles = gl.load(schedule + 4 * entries) * gl.cdiv(N, BN)
    s = 0
    phase = 1
    t = gl.program_id(0)
    following = t + gl.num_programs(0)
    fetched = fetch_tile(t, tiles, schedule, entries, G, M, N, BM, BN, PANEL, KIND)
    while t < tiles:
        later = following + gl.num_programs(0)
        if KIND != DENSE:  # asked for now, needed after this tile's loads
            later = start_fetch_add(schedule + 5 * entries)
        group, row, end, col, first_k, steps = place_tile(fetched, G, M, K, KIND)
        a_row, b_row = operand_rows(group, row, col, M, PARTS * N, KIND)
        fetched = fetch_tile(following, tiles, schedule, entries, G, M, N, BM, BN, PANEL, KIND)
        # A TMA box starts at a multiple of 16 bytes, a group at any row: a consumer's box of scales starts up to three
        # rows early and is twice as long.
        early = a_row % 4 if KIND == ROWS else 0
        scale = 0.0
        scale_2 = 0.0
        sb_first = sb
        sb_part = 0
        if SCALES == BLOCK:
            # One scalar per step, which the producer loads a step ahead, so that no consumer waits for global memory.
            sb_first = sb + (group * gl.cdiv(PARTS * N, 128) + col // 128) * gl.cdiv(K, BK)
            scale = gl.load(sb_first)
            if PARTS == 2:
                sb_part = N // 128 * gl.cdiv(K, BK)
                scale_2 = gl.load(sb_first + sb_part)
        limit = multiplied_until(row, end, BM, KIND)
        if KIND != DENSE:
            mbarrier.wait(empty.index(s), phase)
            write_tile(tile_bufs, s, (group, row, end, col, steps), 1)
            if steps == 0:
                mbarrier.arrive(full.index(s), count=1)
                s, phase = advance(s, phase, STAGES)
        for k in range(steps):
            mbarrier.wait(empty.index(s), phase)
            if SCALES == BLOCK:
                sb_bufs.index(PARTS * s).store(gl.full([1], scale, gl.float32, ONE))
                if PARTS == 2:
                    sb_bufs.index(PARTS * s + 1).store(gl.full([1], scale_2, gl.float32, ONE))
            for i in gl.static_range(CONSUMERS):
                last = row + (i + 1) * ROWS_OF_ONE >= limit if i + 1 < CONSUMERS else True
                mbarrier.expect(full.index(s), (i + 1) * A_BYTES + B_BYTES, pred=last & (row + i * ROWS_OF_ONE < limit))
            for i in gl.static_range(CONSUMERS):
                a_box = [a_row + i * ROWS_OF_ONE, (first_k + k) * BK]
                some = row + i * ROWS_OF_ONE < limit
                tma.async_load(a_desc, a_box, full.index(s), a_bufs.index(CONSUMERS * s + i), pred=some)
            for i in gl.static_range(PARTS):
                b_box = [b_row + i * N, (first_k + k) * BK]
                tma.async_load(b_desc, b_box, full.index(s), b_bufs.index(PARTS * s + i))
            if SCALES >= BLOCK:
                slot = scale_slot(s, 1 - phase, STAGES, SCALES)
                for i in gl.static_range(CONSUMERS):
                    sa_box = [first_k + k, a_row - early + i * ROWS_OF_ONE]
                    some = row + i * ROWS_OF_ONE < limit
                    tma.async_load(sa, sa_box, full.index(s), sa_bufs.index(CONSUMERS * slot + i), pred=some)
            if SCALES == OUTER:
                tma.async_load(sb, [first_k + k, b_row], full.index(s), sb_bufs.index(slot))
            if SCALES == BLOCK:
                scale = gl.load(sb_first + min(k + 1, steps - 1))
                if PARTS == 2:
                    scale_2 = gl.load(sb_first + sb_part + min(k + 1, steps - 1))
            s, phase = advance(s, phase, STAGES)
        t = following
        following = 2 * gl.num_programs(0) + finish_fetch_add(later) if KIND != DENSE else later
    if KIND != DENSE:
        mbarrier.wait(empty.index(s), phase)
        write_tile(tile_bufs, s, (0, 0, 0, 0, -1), 1)
        mbarrier.arrive(full.index(s), count=1)
