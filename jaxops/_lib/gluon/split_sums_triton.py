"""Sums that several programs share: each stores its part in float32, and the one that finishes last adds them up, in
order of the rows: deterministic, whichever program is the last one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxops._lib.gluon.tile_scheduler_triton import finish_fetch_add_of_warps, start_fetch_add_of_warps
from jaxops._lib.ragged.work_list import MOST_PARTS as _MOST_PARTS

MOST_PARTS = gl.constexpr(_MOST_PARTS)


@gluon.jit
def is_first_part(part):
    """part: of the work list, see `schedule_triton.schedule_parts`. True for whole sums, too."""
    return part // MOST_PARTS % MOST_PARTS == 0


@gluon.jit
def number_of_tile(row, col, M, N, BM: gl.constexpr, BN: gl.constexpr):
    """Of the tiles of one group's [M, N], which lies behind other groups' in an array with the rows `row`, and how many
    there are."""
    wide = gl.cdiv(N, BN)
    return row % M // BM * wide + col // BN, gl.cdiv(M, BM) * wide


@gluon.jit
def add_parts(acc, part, tile, tiles, parts_ptr, counters, HALF: gl.constexpr, HALVES: gl.constexpr, MMA: gl.constexpr):
    """Stores acc, a part of a tile's sum. Returns the sum and True if no other part is missing; else acc and False.

    A consumer of half of a tile's rows counts for itself, and so does each program of a cluster.

    Args:
      part: as in `is_first_part`.
      tile, tiles: by `number_of_tile`.
      parts_ptr: float32, a block a part, tile and half. A block is private to these threads: no matrix's layout.
      counters: zeros before the launch. A split sum has at least two parts, so one for every two parts, tile, half and
        program of a cluster is enough.
    """
    HIGH: gl.constexpr = acc.shape[0]
    WIDE: gl.constexpr = acc.shape[1]
    entry = part % MOST_PARTS
    number = part // MOST_PARTS % MOST_PARTS
    count = part // (MOST_PARTS * MOST_PARTS)
    rows = gl.arange(0, HIGH, layout=gl.SliceLayout(1, MMA))
    cols = gl.arange(0, WIDE, layout=gl.SliceLayout(0, MMA))
    inside = rows[:, None] * WIDE + cols[None, :]
    place = tile * HALVES + HALF
    step = gl.cast(tiles, gl.int64) * (HALVES * HIGH * WIDE)
    first = parts_ptr + (entry - number) * step + gl.cast(place, gl.int64) * (HIGH * WIDE)
    gl.store(first + number * step + inside, acc)
    # Release: all threads' stores come before the increment, by this barrier and the atomic's order. Acquire: the last
    # program's loads come after it; from L2, since this multiprocessor's L1 knows nothing of other ones' stores.
    gl.barrier()
    counter = counters + ((entry - number) // 2 * tiles * HALVES + place) * gl.num_ctas()
    last = finish_fetch_add_of_warps(start_fetch_add_of_warps(counter, 4, "acq_rel")) == count - 1
    if last:
        acc = gl.load(first + inside, cache_modifier=".cg")
        for i in range(1, count):
            acc += gl.load(first + i * step + inside, cache_modifier=".cg")
    return acc, last
