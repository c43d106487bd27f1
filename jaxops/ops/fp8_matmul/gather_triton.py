"""The producer of an FP8 product over groups that gathers their rows from an array of tokens, in Gluon on Hopper.

Four warps copy the rows and their scales into the stages (cp.async); TMA loads the weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from jaxops._lib.gluon.gemm_triton import GATHER_ARRIVALS, GATHER_WARPS, advance
from jaxops._lib.gluon.tile_scheduler_triton import finish_fetch_add_of_warps, start_fetch_add_of_warps, write_tile
from jaxops.ops.fp8_matmul.produce_triton import BK, ROWS, fetch_tile, place_tile

BY_ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # a row a thread
BY_CHUNK = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))  # 16 bytes a thread, 128 of a row a step


@gluon.jit
def _tokens_of_rows(indices, fetched, BM: gl.constexpr):
    """What the row indices of a tile hold, which may be anything; 0 behind the tile's end."""
    _i, _j, _group, row, end, _k = fetched
    rows = gl.arange(0, BM, layout=BY_ROW)
    return gl.load(indices + row + rows, mask=rows < end - row, other=0)


@gluon.jit
def produce_gathered(args, gather, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr):
    """As `produce`, of row tiles of groups, two boxes of B a step, and scales of 1x128 and 128x128 blocks.

    gather: the tokens [T, width] and their scales [cdiv(K, 128), T]; the token of each row [M], clamped to [0, T); T;
    width, K rounded up to a multiple of 16.
    """
    b_desc, sb, schedule, bufs, tiles, entries, G, N, K = args
    tokens, token_scales, indices, T, width = gather
    a_bufs, b_bufs, sa_bufs, sb_bufs, tile_bufs, full, empty = bufs
    a_tiles = a_bufs.reinterpret(a_bufs.dtype, [STAGES, BM, BK], a_bufs.layout)  # those of both consumers as one
    width = width // 16 * 16  # no change: tells the compiler of the alignment
    tiles = gl.load(schedule + 4 * entries) * gl.cdiv(N, BN)
    rows = gl.arange(0, BM, layout=BY_ROW)
    rows_of_chunks = gl.arange(0, BM, layout=gl.SliceLayout(1, BY_CHUNK))[:, None]
    cols = gl.arange(0, BK, layout=gl.SliceLayout(0, BY_CHUNK))[None, :]
    one = gl.arange(0, 1, layout=BY_ROW)
    s = 0
    phase = 1
    t = gl.program_id(0)
    following = t + gl.num_programs(0)
    fetched = fetch_tile(t, tiles, schedule, entries, G, 0, N, BM, BN, PANEL, ROWS)
    tokens_of_tile = _tokens_of_rows(indices, fetched, BM)
    while t < tiles:
        # Asked for now, needed after this tile's loads.
        asked = start_fetch_add_of_warps(schedule + 5 * entries, GATHER_WARPS)
        group, row, end, col, _first, steps = place_tile(fetched, G, 0, K, ROWS)
        fetched = fetch_tile(following, tiles, schedule, entries, G, 0, N, BM, BN, PANEL, ROWS)
        token = gl.minimum(gl.maximum(tokens_of_tile, 0), T - 1)
        inside = gl.where(steps > 0, end - row, 0)
        first_col = gl.where(steps > 0, 0, gl.cdiv(K, BK) * BK)  # TMA boxes start at multiples of 16 bytes
        pointers = gl.convert_layout(token, gl.SliceLayout(1, BY_CHUNK)).to(gl.int64)[:, None] * width + cols + tokens
        scales = token_scales + token
        blocks = gl.cdiv(K, BK)
        sb_first = sb + (group * (2 * N // 128) + col // 128) * blocks
        mbarrier.wait(empty.index(s), phase)
        write_tile(tile_bufs, s, (group, row, end, col, steps), GATHER_WARPS)
        # Outside the groups one step of zeros, which TMA fills in past K. So all threads arrive at each stage: a warp
        # that ran a whole round of stages ahead could make another one miss a phase.
        for k in range(max(steps, 1)):
            if k + 1 >= steps:  # by now it is known where the next tile's rows start
                tokens_of_tile = _tokens_of_rows(indices, fetched, BM)
            mbarrier.wait(empty.index(s), phase)
            mbarrier.expect(full.index(s), 2 * b_desc.nbytes_per_cta)
            for i in gl.static_range(2):
                b_box = [col + (2 * group + i) * N, first_col + k * BK]
                tma.async_load(b_desc, b_box, full.index(s), b_bufs.index(2 * s + i))
                async_copy.async_load(sb_bufs.index(2 * s + i), sb_first + (i * (N // 128) * blocks + k) + one)
            mask = rows_of_chunks < gl.where(cols < width - k * BK, inside, 0)
            async_copy.async_load(a_tiles.index(s), pointers + k * BK, mask=mask)
            async_copy.async_load(sa_bufs.index(s), scales + k * T, mask=rows < inside)
            async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            s, phase = advance(s, phase, STAGES)
        t = following
        following = 2 * gl.num_programs(0) + finish_fetch_add_of_warps(asked)
    mbarrier.wait(empty.index(s), phase)
    write_tile(tile_bufs, s, (0, 0, 0, 0, -1), GATHER_WARPS)
    mbarrier.arrive(full.index(s), count=GATHER_ARRIVALS)
