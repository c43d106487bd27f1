"""Pallas kernels that turn device-side offsets into each program's work list: one small launch, before the pass that reads it."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.fp8 import BLOCK
from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.powers import power_of_2
from jaxops._lib.ragged import runs
from jaxops._lib.tiling import row_tiles, tile_bound
from jaxops._lib.traced_once import traced_once
from jaxops._lib.work_list import COLUMNS, Spans

_ELEMENTS = 2048  # of a program's [block, runs] comparison: 16 registers a thread at 4 warps


def _rows_kernel(offsets_ref, tiles_ref, *, G: int, M: int, bm: int, spans: Spans, block: int):
    r = jnp.arange(power_of_2(G + 2), dtype=jnp.int32)
    lo, hi = runs(lambda i: plgpu.load(offsets_ref.at[i]), r, G, M)
    t = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    if spans:
        mine = functools.reduce(jnp.logical_or, [(first <= r) & (r < end) for first, end in spans])
        hi = jnp.where(mine, hi, lo)
    group, start, end = row_tiles(t, lo, hi, G, bm)
    count = (hi - lo + bm - 1) // bm
    before = jnp.sum(jnp.where(r == 0, count, 0), dtype=jnp.int32)
    if len(spans) > 1:
        ends = [jnp.sum(jnp.where(r < end, count, 0), dtype=jnp.int32) for _, end in spans]
        total = functools.reduce(
            lambda found, i: jnp.where(t >= i, ends[i], found), range(1, len(spans)), jnp.full_like(t, ends[0])
        )
    else:
        total = jnp.full_like(t, jnp.sum(count, dtype=jnp.int32))
    # Offsets that break the contract may have rows in several runs, and then more tiles than a list has entries.
    total = jnp.minimum(total, tile_bound(M, G, bm))
    for i, column in enumerate((group, start, end, jnp.where(group < G, t - before, -1), total, jnp.zeros_like(t))):
        plgpu.store(tiles_ref.at[i * (tiles_ref.shape[0] // COLUMNS) + t], column)


def _groups_kernel(offsets_ref, groups_ref, *, G: int, M: int, bm: int, parts: tuple[int, ...], block: int):
    def group(g):
        lo, hi = runs(lambda i: plgpu.load(offsets_ref.at[i]), g + 1, G, M)
        return (
            lo,
            hi,
            jnp.where(g < G, hi - lo, -1),
        )  # the numbers that fill up the power of two rank behind every group

    g = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    h = jnp.arange(power_of_2(G), dtype=jnp.int32)
    lo, hi, size = group(g)
    *_, other = group(h)
    before = (other[None, :] > size[:, None]) | ((other[None, :] == size[:, None]) & (h[None, :] < g[:, None]))
    for first in parts:  # who is on one side of it keeps there
        before = (before | ((h < first)[None, :] & (g >= first)[:, None])) & ~(
            (h >= first)[None, :] & (g < first)[:, None]
        )
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)
    first = jnp.sum(
        jnp.where(h[None, :] < g[:, None], (jnp.maximum(other, 0) + bm - 1)[None, :] // bm, 0), axis=1, dtype=jnp.int32
    )
    for i, column in enumerate((g, lo, hi, first, jnp.full_like(g, G), jnp.zeros_like(g))):
        plgpu.store(groups_ref.at[i * (groups_ref.shape[0] // COLUMNS) + rank], column)


def _launch(kernel, offsets: jax.Array, count: int, runs: int, interpret: bool, name: str) -> jax.Array:
    """COLUMNS columns of `count` entries and what fills up the last program's block."""
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
    )


@traced_once("M", "bm", "interpret", "spans")
def schedule_rows(offsets: jax.Array, M: int, bm: int, interpret: bool, spans: Spans = ()) -> jax.Array:
    """Of each row tile its group (G outside the groups), first row, end, and number among the tiles inside the groups (-1 outside); then, of all alike, how
    many tiles there are, and zeros, for a kernel to count in.

    int32, COLUMNS columns of tile_bound(M, G, bm) entries or more; a number past the last tile has no rows. spans: of runs (`ragged.runs`), whose tiles
    alone are in the list, span by span; then entry i of the count is how many there are in all spans up to i, and later entries are the last one's.
    """
    G = offsets.shape[0] - 1
    return _launch(
        functools.partial(_rows_kernel, G=G, M=M, bm=bm, spans=spans),
        offsets,
        tile_bound(M, G, bm),
        G + 2,
        interpret,
        "schedule_rows",
    )


@traced_once("M", "interpret", "bm", "parts")
def schedule_groups(
    offsets: jax.Array, M: int, interpret: bool, bm: int = BLOCK, parts: tuple[int, ...] = ()
) -> jax.Array:
    """The groups, largest first so that no long one is left for the end; of each its first row, its end, and how many tiles of bm rows the groups
    before it (by number) take: where it starts in a copy whose groups are padded to whole tiles; then G, and zeros, for a kernel to count in. int32,
    COLUMNS columns of G entries or more. parts: first groups of parts that stay one after the other, each with its own largest first."""
    G = offsets.shape[0] - 1
    return _launch(
        functools.partial(_groups_kernel, G=G, M=M, bm=bm, parts=parts), offsets, G, G, interpret, "schedule_groups"
    )
