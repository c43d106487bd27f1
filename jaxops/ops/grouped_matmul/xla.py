"""The portable backend: a loop over row tiles with dynamic slices, no copy of lhs a group. CPU, TPU, and the benchmarks' plain-XLA side."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._lib.manual_axes import vary_together
from jaxops._lib.powers import power_of_2
from jaxops._lib.ragged import runs
from jaxops._lib.tiling import row_tiles, tile_bound

_SYMBOLIC = 128  # rows a tile where M is symbolic (jax.export): arrays are padded by that many, so that a tile is no longer than they are


def _tile_rows(M: int, G: int) -> int:
    """Rows a tile: about the mean group, a power of two between 16 and 512 (measured on a 2-core CPU, benchmarks/results/cpu)."""
    return _SYMBOLIC if _is_symbolic(M) else min(512, max(16, power_of_2(M // max(G, 1))), M)


def _is_symbolic(M) -> bool:
    return not isinstance(M, (int, np.integer))


def _with_room(x: jax.Array, M) -> jax.Array:
    """x[M, columns], at least as high as a tile."""
    return jnp.pad(x, ((0, _SYMBOLIC), (0, 0))) if _is_symbolic(M) else x


def _sum_dtype(dtype) -> jnp.dtype:
    """In which dtype products of that dtype are summed: float32 or int32, or their own where that is wider."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.promote_types(dtype, jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32)
    return dtype if dtype.itemsize > 4 else jnp.dtype("float32")


def _for_each_tile(offsets: jax.Array, M: int, body, init: jax.Array) -> jax.Array:
    """Folds `body(group, slice start, rows_in[bm, 1], carry)` over the tiles inside the groups."""
    G = offsets.shape[0] - 1
    bm = _tile_rows(M, G)
    lo, hi = runs(lambda i: offsets[i], jnp.arange(G + 2, dtype=jnp.int32), G, M)
    group, start, end = row_tiles(jnp.arange(tile_bound(M, G, bm), dtype=jnp.int32), lo, hi, G, bm)
    # Tiles are numbered run by run: those of the run before the groups come first, those behind the groups last.
    count = (hi - lo + bm - 1) // bm

    def step(t, carry):
        first = (
            start[t] if _is_symbolic(M) else jnp.minimum(start[t], M - bm)
        )  # where dynamic_slice would clamp to; the mask below follows
        row = first + jnp.arange(bm, dtype=jnp.int32)
        return body(group[t], first, bm, ((start[t] <= row) & (row < end[t]))[:, None], carry)

    return lax.fori_loop(count[0], jnp.minimum(jnp.sum(count[: G + 1], dtype=jnp.int32), group.shape[0]), step, init)


def fwd_xla(lhs, rhs, bias, offsets, *, transpose_rhs: bool, precision: lax.PrecisionLike, out_dtype) -> jax.Array:
    """As `fwd_pallas`."""
    M, N = lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    contract = (((1,), (1 if transpose_rhs else 0,)), ((), ()))

    lhs, sums = _with_room(lhs, M), _sum_dtype(lhs.dtype)

    def body(g, first, bm, mine, out):
        rows = lax.dynamic_slice_in_dim(lhs, first, bm)
        tile = lax.dot_general(rows, rhs[g], contract, precision=precision, preferred_element_type=sums)
        if bias is not None:
            tile += bias[g].astype(sums)[None, :]
        return lax.dynamic_update_slice_in_dim(
            out, jnp.where(mine, tile.astype(out_dtype), lax.dynamic_slice_in_dim(out, first, bm)), first, 0
        )

    init, _ = vary_together(jnp.zeros((lhs.shape[0], N), out_dtype), lhs)
    return _for_each_tile(offsets, M, body, init)[:M]


def wgrad_xla(lhs, dout, accumulator, offsets, *, precision: lax.PrecisionLike, out_dtype) -> jax.Array:
    """As `wgrad_pallas`."""
    M, G, sums = lhs.shape[0], offsets.shape[0] - 1, _sum_dtype(lhs.dtype)
    lhs, dout = _with_room(lhs, M), _with_room(dout, M)

    def body(g, first, bm, mine, out):
        rows = jnp.where(mine, lax.dynamic_slice_in_dim(lhs, first, bm), 0)
        douts = jnp.where(mine, lax.dynamic_slice_in_dim(dout, first, bm), 0)
        tile = lax.dot_general(rows, douts, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=sums)
        return out.at[g].add(tile)

    init = jnp.zeros((G, lhs.shape[1], dout.shape[1]), sums) if accumulator is None else accumulator.astype(sums)
    init, _ = vary_together(init, lhs)
    return _for_each_tile(offsets, M, body, init).astype(out_dtype)
