"""Pallas kernels that turn device-side offsets into the work list of a pass: one small launch before it."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.numerics.fp8 import BLOCK
from jaxops._lib.pallas.launch_pallas import launch
from jaxops._lib.planning.traced_once import traced_once
from jaxops._lib.ragged.offsets import runs
from jaxops._lib.ragged.tiling import row_tiles, tile_bound
from jaxops._lib.ragged.work_list import COLUMNS, Spans

# Rows up to which each program finds its own tile in the offsets: the list is a launch of 2 us, and one more gap
# between two (H200, 2026-11-24, 8 rows in 128 groups), as much as reading 10 MB takes.
_FEW = 2048
_ELEMENTS = 2048  # of a program's [block, runs] comparison: 16 registers a thread at 4 warps


def _store(work_ref, t: jax.Array, columns) -> None:
    for i, column in enumerate((*columns, jnp.zeros_like(t))):
        plgpu.store(work_ref.at[i * (work_ref.shape[0] // COLUMNS) + t], column)


def _rows_kernel(offsets_ref, work_ref, *, G: int, M: int, bm: int, spans: Spans, block: int):
    r = jnp.arange(power_of_2(G + 2), dtype=jnp.int32)
    lo, hi = runs(lambda i: plgpu.load(offsets_ref.at[i]), r, G, M)
    t = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    if spans:
        listed = functools.reduce(jnp.logical_or, [(first <= r) & (r < end) for first, end in spans])
        hi = jnp.where(listed, hi, lo)
    group, start, end = row_tiles(t, lo, hi, G, bm)
    count = (hi - lo + bm - 1) // bm
    before = jnp.sum(jnp.where(r == 0, count, 0), dtype=jnp.int32)
    total = jnp.full_like(t, jnp.sum(count, dtype=jnp.int32))
    for i, (_, last) in enumerate(spans[:-1]):
        total = jnp.where(t == i, jnp.sum(jnp.where(r < last, count, 0), dtype=jnp.int32), total)
    # Offsets that break the contract may put rows into several runs, and then need more tiles than the list has
    # entries.
    total = jnp.minimum(total, tile_bound(M, G, bm))
    _store(work_ref, t, (group, start, end, jnp.where(group < G, t - before, -1), total))


def _groups_kernel(offsets_ref, work_ref, *, G: int, M: int, bm: int, parts: tuple[int, ...], block: int):
    def group(g):
        lo, hi = runs(lambda i: plgpu.load(offsets_ref.at[i]), g + 1, G, M)
        return lo, hi, jnp.where(g < G, hi - lo, -1)  # numbers past the last group rank behind all groups

    g = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    h = jnp.arange(power_of_2(G), dtype=jnp.int32)
    lo, hi, size = group(g)
    *_, other = group(h)
    earlier = h[None, :] < g[:, None]
    ahead = (other[None, :] > size[:, None]) | ((other[None, :] == size[:, None]) & earlier)
    for first in parts:  # groups do not cross the border between two modalities
        ahead = (ahead | ((h < first)[None, :] & (g >= first)[:, None])) & (
            (h < first)[None, :] | (g >= first)[:, None]
        )
    rank = jnp.sum(ahead, axis=1, dtype=jnp.int32)
    tiles = (jnp.maximum(other, 0) + bm - 1) // bm
    first = jnp.sum(jnp.where(earlier, tiles[None, :], 0), axis=1, dtype=jnp.int32)
    _store(work_ref, rank, (g, lo, hi, first, jnp.full_like(g, G)))


def _launch(kernel, offsets: jax.Array, count: int, runs: int, interpret: bool, name: str) -> jax.Array:
    """COLUMNS columns of `count` entries, padded to whole programs."""
    block = max(1, min(power_of_2(count), _ELEMENTS // power_of_2(runs)))
    programs = pl.cdiv(count, block)
    return launch(
        functools.partial(kernel, block=block),
        offsets,
        out=out_struct((COLUMNS * programs * block,), jnp.int32, like=offsets),
        grid=(programs,),
        warps=4,
        interpret=interpret,
        name=name,
        flops=0,
    )


@traced_once("M", "bm", "interpret", "spans")
def schedule_rows(offsets: jax.Array, M: int, bm: int, interpret: bool, spans: Spans = ()) -> jax.Array:
    """The row tiles of all runs: int32, COLUMNS columns of tile_bound(M, G, bm) entries or more.

    Columns: the tile's group (G outside the groups), first row, end, number among the tiles inside the groups (-1
    outside); the number of tiles; zeros, for a kernel to count in. Entries past the last tile have no rows. With spans
    only tiles of those runs are listed, span by span, and entry i of the count is the number of tiles in spans 0 to i.
    """
    G = offsets.shape[0] - 1
    kernel = functools.partial(_rows_kernel, G=G, M=M, bm=bm, spans=spans)
    return _launch(kernel, offsets, tile_bound(M, G, bm), G + 2, interpret, "schedule_rows")


def work_of_rows(offsets: jax.Array, M: int, bm: int, interpret: bool) -> jax.Array:
    """What `tile_of` reads: the list of `schedule_rows`, or, for few rows, the offsets themselves."""
    return offsets if finds_own(M) else schedule_rows(offsets, M, bm, interpret)


def tile_of(work_ref, t: jax.Array, G: int, M: int, bm: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group (G outside the groups), first row and end of a program's row tile t; a tile past the last one has no rows.

    Args:
      work_ref: of `work_of_rows` with the same M and bm.
    """
    if not finds_own(M):
        return tile_in_list(work_ref, t)
    r = jnp.arange(power_of_2(G + 2), dtype=jnp.int32)
    lo, hi = runs(lambda i: plgpu.load(work_ref.at[i]), r, G, M)
    group, start, end = (jnp.sum(x, dtype=jnp.int32) for x in row_tiles(jnp.full(1, t, jnp.int32), lo, hi, G, bm))
    return group, start, end


def tile_in_list(work_ref, t: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `tile_of`, of a list of `schedule_rows`."""
    group, start, end = (plgpu.load(work_ref.at[n * (work_ref.shape[0] // COLUMNS) + t]) for n in range(3))
    return group, start, end


def finds_own(M: int) -> bool:
    """Whether M rows are few: programs find their own tiles. An M that is a symbol (`jax.export`) is not compared."""
    return isinstance(M, int) and M <= _FEW


@traced_once("M", "interpret", "bm", "parts")
def schedule_groups(
    offsets: jax.Array, M: int, interpret: bool, bm: int = BLOCK, parts: tuple[int, ...] = ()
) -> jax.Array:
    """The groups, longest first, so that no long one is left for the end: int32, COLUMNS columns of G entries or more.

    Columns: the group, first row, end, how many tiles of bm rows the groups before it (by number) take; G; zeros.
    parts: first groups of modalities, which stay in order, each with its own longest group first.
    """
    G = offsets.shape[0] - 1
    kernel = functools.partial(_groups_kernel, G=G, M=M, bm=bm, parts=parts)
    return _launch(kernel, offsets, G, G, interpret, "schedule_groups")
