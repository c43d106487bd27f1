"""The portable backend: a loop over row tiles with dynamic slices, no copy of lhs a group. CPU, TPU, and the benchmarks' plain-XLA side."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.manual_axes import vary_together
from jaxops._lib.powers import power_of_2
from jaxops._lib.ragged import runs
from jaxops._lib.tiling import row_tiles, tile_bound


def _tile_rows(M: int, G: int) -> int:
    """Rows a tile: about the mean group, a power of two between 16 and 512 (measured on a 2-core CPU, benchmarks/results/cpu)."""
    return min(512, max(16, power_of_2(M // max(G, 1))), M)


def _for_each_tile(offsets: jax.Array, M: int, body, init: jax.Array) -> jax.Array:
    """Folds `body(group, slice start, rows_in[bm, 1], carry)` over the tiles inside the groups."""
    G = offsets.shape[0] - 1
    bm = _tile_rows(M, G)
    lo, hi = runs(lambda i: offsets[i], jnp.arange(G + 2, dtype=jnp.int32), G, M)
    group, start, end = row_tiles(jnp.arange(tile_bound(M, G, bm), dtype=jnp.int32), lo, hi, G, bm)
    # Tiles are numbered run by run: those of the run before the groups come first, those behind the groups last.
    count = (hi - lo + bm - 1) // bm

    def step(t, carry):
        first = jnp.minimum(start[t], M - bm)  # where dynamic_slice would clamp to; the mask below follows
        row = first + jnp.arange(bm, dtype=jnp.int32)
        return body(group[t], first, bm, ((start[t] <= row) & (row < end[t]))[:, None], carry)

    return lax.fori_loop(count[0], jnp.minimum(jnp.sum(count[: G + 1], dtype=jnp.int32), group.shape[0]), step, init)


def fwd_xla(lhs, rhs, bias, offsets, *, transpose_rhs: bool, precision: lax.Precision, out_dtype) -> jax.Array:
    """As `fwd_pallas`."""
    M, N = lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    contract = (((1,), (1 if transpose_rhs else 0,)), ((), ()))

    def body(g, first, bm, mine, out):
        rows = lax.dynamic_slice_in_dim(lhs, first, bm)
        tile = lax.dot_general(rows, rhs[g], contract, precision=precision, preferred_element_type=jnp.float32)
        if bias is not None:
            tile += bias[g].astype(jnp.float32)[None, :]
        return lax.dynamic_update_slice_in_dim(out, jnp.where(mine, tile.astype(out_dtype), lax.dynamic_slice_in_dim(out, first, bm)), first, 0)

    init, _ = vary_together(jnp.zeros((M, N), out_dtype), lhs)
    return _for_each_tile(offsets, M, body, init)


def wgrad_xla(lhs, dout, accumulator, offsets, *, precision: lax.Precision, out_dtype) -> jax.Array:
    """As `wgrad_pallas`."""
    M, G = lhs.shape[0], offsets.shape[0] - 1

    def body(g, first, bm, mine, out):
        rows = jnp.where(mine, lax.dynamic_slice_in_dim(lhs, first, bm), 0)
        douts = jnp.where(mine, lax.dynamic_slice_in_dim(dout, first, bm), 0)
        tile = lax.dot_general(rows, douts, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
        return out.at[g].add(tile)

    init = jnp.zeros((G, lhs.shape[1], dout.shape[1]), jnp.float32) if accumulator is None else accumulator.astype(jnp.float32)
    init, _ = vary_together(init, lhs)
    return _for_each_tile(offsets, M, body, init).astype(out_dtype)
