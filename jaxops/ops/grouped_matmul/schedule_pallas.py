"""Pallas kernels that turn device-side offsets into each program's work list: one small launch, before the pass that reads it."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.manual_axes import out_struct
from jaxops._lib.ragged import runs
from jaxops.ops.grouped_matmul.tiling import row_tiles, tile_bound

_ELEMENTS = 2048  # of a program's [block, runs] comparison: 16 registers a thread at 4 warps


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _rows_kernel(offsets_ref, tiles_ref, *, G: int, M: int, bm: int, block: int):
    r = jnp.arange(_power_of_2(G + 2), dtype=jnp.int32)
    lo, hi = runs(lambda i: plgpu.load(offsets_ref.at[i]), r, G, M)
    t = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    for i, column in enumerate(row_tiles(t, lo, hi, G, bm)):
        plgpu.store(tiles_ref.at[i * (tiles_ref.shape[0] // 3) + t], column)


def _groups_kernel(offsets_ref, groups_ref, *, G: int, M: int, block: int):
    def group(g):
        lo, hi = runs(lambda i: plgpu.load(offsets_ref.at[i]), g + 1, G, M)
        return lo, hi, jnp.where(g < G, hi - lo, -1)  # the numbers that fill up the power of two rank behind every group

    g = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    h = jnp.arange(_power_of_2(G), dtype=jnp.int32)
    lo, hi, size = group(g)
    *_, other = group(h)
    before = (other[None, :] > size[:, None]) | ((other[None, :] == size[:, None]) & (h[None, :] < g[:, None]))
    rank = jnp.sum(before.astype(jnp.int32), axis=1)
    for i, column in enumerate((g, lo, hi)):
        plgpu.store(groups_ref.at[i * (groups_ref.shape[0] // 3) + rank], column)


def _launch(kernel, offsets: jax.Array, count: int, runs: int, interpret: bool, name: str) -> jax.Array:
    """A column each for group, first row and end, `count` entries and what fills up the last program's block."""
    block = max(1, min(_power_of_2(count), _ELEMENTS // _power_of_2(runs)))
    programs = pl.cdiv(count, block)
    return pl.pallas_call(
        functools.partial(kernel, block=block),
        out_shape=out_struct((3 * programs * block,), jnp.int32, like=offsets),
        grid=(programs,),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )(offsets)


def schedule_rows(offsets: jax.Array, M: int, bm: int, interpret: bool) -> jax.Array:
    """The groups of all row tiles, then their first rows, then their ends: int32, three columns of tile_bound(M, G, bm) entries or more."""
    G = offsets.shape[0] - 1
    return _launch(functools.partial(_rows_kernel, G=G, M=M, bm=bm), offsets, tile_bound(M, G, bm), G + 2, interpret, "grouped_matmul_schedule")


def schedule_groups(offsets: jax.Array, M: int, interpret: bool) -> jax.Array:
    """The groups, largest first so that no long one is left for the end, then their first rows, then their ends: int32, three columns of G or more."""
    G = offsets.shape[0] - 1
    return _launch(functools.partial(_groups_kernel, G=G, M=M), offsets, G, G, interpret, "grouped_wgrad_schedule")
