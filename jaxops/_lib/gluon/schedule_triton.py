"""Triton kernels that turn device-side offsets into the work list of a pass: one small launch before it. As
schedule_pallas.py."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.gluon.launch_triton import triton_call
from jaxops._lib.numerics.fp8 import BLOCK
from jaxops._lib.ragged.tiling import tile_bound
from jaxops._lib.ragged.work_list import COLUMNS as _COLUMNS
from jaxops._lib.ragged.work_list import MOST_PARTS as _MOST_PARTS
from jaxops._lib.ragged.work_list import PANEL_BASE as _PANEL_BASE
from jaxops._lib.ragged.work_list import STEP_ROWS as _STEP_ROWS
from jaxops._lib.ragged.work_list import Spans, least_rows_of_part

COLUMNS, MOST_PARTS, STEP_ROWS = tl.constexpr(_COLUMNS), tl.constexpr(_MOST_PARTS), tl.constexpr(_STEP_ROWS)
PANEL_BASE = tl.constexpr(_PANEL_BASE)
_ELEMENTS = 2048  # of a program's [BLOCK, RUNS] comparison: 16 registers a thread at 4 warps


@triton.jit
def _bounds(offsets, r, G, M):
    """First row and end of run r, clipped to [0, M]: see `ragged.runs`."""
    first = tl.load(offsets + tl.minimum(tl.maximum(r - 1, 0), G))
    lo = tl.where(r == 0, 0, tl.where(r <= G + 1, first, M))
    hi = tl.where(r <= G, tl.load(offsets + tl.minimum(r, G)), M)
    lo = tl.minimum(tl.maximum(lo, 0), M)
    return lo, tl.minimum(tl.maximum(hi, lo), M)


@triton.jit
def _zero(first, zeros):
    """A program's `zeros` zeros behind the columns."""
    at = tl.program_id(0) * zeros
    for z in range(0, zeros, 256):
        i = z + tl.arange(0, 256)
        tl.store(first + at + i, tl.zeros([256], tl.int32), mask=i < zeros)


@triton.jit
def schedule_rows_kernel(
    offsets, work, room, G, limits, spans, BM: tl.constexpr, PANEL: tl.constexpr, BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    entries, zeros = room
    M, bound = limits
    r = tl.arange(0, RUNS)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lo, hi = _bounds(offsets, r, G, M)
    if spans is not None:
        listed = r < 0
        for i in tl.static_range(len(spans)):
            listed = listed | ((spans[i][0] <= r) & (r < spans[i][1]))
        hi = tl.where(listed, hi, lo)
    count = (hi - lo + BM - 1) // BM
    after = tl.cumsum(count, 0)
    first = after - count
    mine = (first[None, :] <= t[:, None]) & (t[:, None] < after[None, :])  # at most one True a row
    group = tl.sum(tl.where(mine & ((r >= 1) & (r <= G))[None, :], r[None, :] - 1 - G, 0), 1) + G
    start = tl.sum(tl.where(mine, lo[None, :] + (t[:, None] - first[None, :]) * BM, 0), 1)
    end = tl.minimum(start + BM, tl.sum(tl.where(mine, hi[None, :], 0), 1))
    total = tl.zeros([BLOCK], tl.int32) + tl.sum(count, 0)
    if spans is not None:
        for i in tl.static_range(len(spans) - 1):
            reached = tl.sum(tl.where(r < spans[i][1], count, 0), 0)
            total = tl.where(t == i, reached, total)
    # Offsets that break the contract may put rows into several runs, and then need more tiles than the list has
    # entries.
    total = tl.minimum(total, bound)
    # A run's tiles in panels of about PANEL, equally high: see `place_in_panel_of_group`.
    of_run = tl.sum(tl.where(mine, count[None, :], 0), 1)
    number = t - tl.sum(tl.where(mine, first[None, :], 0), 1)
    panels = tl.maximum((of_run + PANEL // 2) // PANEL, 1)
    high = tl.maximum((of_run + panels - 1) // panels, 1)
    inside = number % high
    high = tl.minimum(high, tl.minimum(of_run - number, bound - t) + inside)  # the last panel's, and the list's end
    tl.store(work + t, group)
    tl.store(work + entries + t, start)
    tl.store(work + 2 * entries + t, end)
    tl.store(work + 3 * entries + t, inside * PANEL_BASE + high)
    tl.store(work + 4 * entries + t, total)
    tl.store(work + 5 * entries + t, tl.zeros([BLOCK], tl.int32))
    _zero(work + COLUMNS * entries, zeros)


@triton.jit
def schedule_groups_kernel(offsets, work, room, G, M, parts, BM: tl.constexpr, BLOCK: tl.constexpr, RUNS: tl.constexpr):
    entries, zeros = room
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.arange(0, RUNS)
    lo, hi = _bounds(offsets, g + 1, G, M)
    size = tl.where(g < G, hi - lo, -1)  # numbers past the last group rank behind all groups
    other_lo, other_hi = _bounds(offsets, h + 1, G, M)
    other = tl.where(h < G, other_hi - other_lo, -1)
    earlier = h[None, :] < g[:, None]
    ahead = (other[None, :] > size[:, None]) | ((other[None, :] == size[:, None]) & earlier)
    if parts is not None:
        for i in tl.static_range(len(parts)):  # groups do not cross the border between two modalities
            ahead = (ahead | ((h < parts[i])[None, :] & (g >= parts[i])[:, None])) & (
                (h < parts[i])[None, :] | (g >= parts[i])[:, None]
            )
    rank = tl.sum(ahead.to(tl.int32), 1)
    tiles = (tl.maximum(other, 0) + BM - 1) // BM
    first = tl.sum(tl.where(earlier, tiles[None, :], 0), 1)
    tl.store(work + rank, g)
    tl.store(work + entries + rank, lo)
    tl.store(work + 2 * entries + rank, hi)
    tl.store(work + 3 * entries + rank, first)
    tl.store(work + 4 * entries + rank, tl.zeros([BLOCK], tl.int32) + G)
    tl.store(work + 5 * entries + rank, tl.zeros([BLOCK], tl.int32))
    _zero(work + COLUMNS * entries, zeros)


@triton.jit
def schedule_parts_kernel(offsets, work, room, G, M, cut, BLOCK: tl.constexpr, RUNS: tl.constexpr, PARTS: tl.constexpr):
    entries, zeros = room
    least, slots = cut
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.arange(0, RUNS)
    lo, hi = _bounds(offsets, g + 1, G, M)
    size = tl.where(g < G, hi - lo, -1)
    other_lo, other_hi = _bounds(offsets, h + 1, G, M)
    other = tl.where(h < G, other_hi - other_lo, -1)
    long = other >= 2 * least
    # Offsets that break the contract may put rows into several groups, which then need more slots than there are: sums
    # are whole.
    fits = tl.sum(tl.where(long, other // least, 0), 0) <= slots
    count = tl.where(long & fits, other // least, 1)
    own = tl.where((size >= 2 * least) & fits, size // least, 1)
    ahead = (other[None, :] > size[:, None]) | ((other[None, :] == size[:, None]) & (h[None, :] < g[:, None]))
    first = tl.sum(tl.where(ahead, count[None, :], 0), 1)
    total = tl.sum(tl.where(h < G, count, 0), 0)
    steps = (size + STEP_ROWS - 1) // STEP_ROWS
    each = steps // own
    more = steps % own  # the first `more` parts have one step more
    i = tl.arange(0, PARTS)[None, :]
    start = lo[:, None] + STEP_ROWS * (i * each[:, None] + tl.minimum(i, more[:, None]))
    end = lo[:, None] + STEP_ROWS * ((i + 1) * each[:, None] + tl.minimum(i + 1, more[:, None]))
    entry = first[:, None] + i
    part = tl.where(own[:, None] > 1, (own[:, None] * MOST_PARTS + i) * MOST_PARTS + entry, 0)
    listed = (g < G)[:, None] & (i < own[:, None])
    tl.store(work + entry, g[:, None] + 0 * i, mask=listed)
    tl.store(work + entries + entry, start, mask=listed)
    tl.store(work + 2 * entries + entry, tl.minimum(end, hi[:, None]), mask=listed)
    tl.store(work + 3 * entries + entry, part, mask=listed)
    tl.store(work + 4 * entries + entry, total + 0 * entry, mask=listed)
    tl.store(work + 5 * entries + entry, 0 * entry, mask=listed)
    _zero(work + COLUMNS * entries, zeros)


def _launch(kernel, offsets: jax.Array, zeros: int, count: int, runs: int, **named) -> tuple[jax.Array, int]:
    """All columns of `count` entries, padded to whole programs."""
    runs = power_of_2(runs)
    block = max(1, min(power_of_2(count), _ELEMENTS // runs))
    programs = -(-count // block)
    return _call(kernel, offsets, zeros, programs, programs * block, BLOCK=block, RUNS=runs, **named)


def _call(kernel, offsets: jax.Array, zeros: int, programs: int, entries: int, **named) -> tuple[jax.Array, int]:
    """The list and its entries."""
    each = -(-zeros // programs)
    schedule = triton_call(
        offsets,
        kernel=kernel,
        out_type=out_struct((_COLUMNS * entries + programs * each,), jnp.int32, like=offsets),
        grid=programs,
        name=kernel.fn.__name__.removesuffix("_kernel"),
        flops=0,
        room=(entries, each),
        G=offsets.shape[0] - 1,
        **named,
    )
    return schedule, entries


def schedule_rows(
    offsets: jax.Array, M: int, bm: int, spans: Spans = (), *, panel: int = 1, zeros: int = 0
) -> tuple[jax.Array, int]:
    """As `schedule_pallas.schedule_rows`, but for the fourth column: a tile's place in its panel times PANEL_BASE, plus
    the panel's height. A group's row tiles make panels of about `panel` of them, as equally high as they can be.
    Returns the list and its entries; behind its columns are at least `zeros` zeros, to count in."""
    G = offsets.shape[0] - 1
    bound = tile_bound(M, G, bm)
    return _launch(
        schedule_rows_kernel, offsets, zeros, bound, G + 2, limits=(M, bound), spans=spans or None, BM=bm, PANEL=panel
    )


def schedule_groups(
    offsets: jax.Array, M: int, parts: tuple[int, ...] = (), *, zeros: int = 0
) -> tuple[jax.Array, int]:
    """As `schedule_pallas.schedule_groups`; returns what `schedule_rows` does."""
    G = offsets.shape[0] - 1
    return _launch(schedule_groups_kernel, offsets, zeros, G, G, M=M, parts=parts or None, BM=BLOCK)


def schedule_parts(offsets: jax.Array, M: int, split: int, *, zeros: int) -> tuple[jax.Array, int]:
    """As `schedule_groups`, with sums over long groups cut into parts.

    A group of n >= 2 * least rows has n // least parts of whole steps, each an entry with its own rows, where least is
    `least_rows_of_part`. Parts come before whole groups. Columns: the group, first row, end, the part (0 of a whole
    group; else how many there are, its number and its entry, as digits of base MOST_PARTS); the number of entries;
    zeros.
    """
    G, least = offsets.shape[0] - 1, least_rows_of_part(M, split)
    slots, runs = M // least, power_of_2(G)
    most = power_of_2(slots)
    block = max(1, min(runs, _ELEMENTS // max(runs, most)))
    return _call(
        schedule_parts_kernel, offsets, zeros, -(-G // block), G + slots, M=M, cut=(least, slots), BLOCK=block,
        RUNS=runs, PARTS=most,
    )  # fmt: skip
