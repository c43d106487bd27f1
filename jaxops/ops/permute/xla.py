"""The portable backend: gathers and sums, and no scatter that adds. CPU, TPU, and the benchmark's plain-XLA side."""

import jax
import jax.numpy as jnp

from jaxops._lib.ragged import clip_bounds
from jaxops.ops.permute.places import Places


def permute_xla(x: jax.Array, places: Places) -> jax.Array:
    """[R, D] in x's dtype."""
    return jnp.where(_inside(places)[:, None], x[_tokens(places, x)], 0)


def combine_xla(rows: jax.Array, weights: jax.Array | None, places: Places, out_dtype) -> jax.Array:
    """[T, D]; without weights they are ones."""
    has_row, found = _gather(rows, places)
    if weights is not None:
        found = found * jnp.where(has_row, weights, 0)[:, :, None]
    return jnp.sum(found, axis=1).astype(out_dtype)


def combine_gradient_xla(
    rows: jax.Array, weights: jax.Array, dout: jax.Array, places: Places
) -> tuple[jax.Array, jax.Array]:
    """(drows [R, D] in rows' dtype, dweights [T, k])"""
    has_row, found = _gather(rows, places)
    dweights = jnp.where(has_row, jnp.sum(dout.astype(jnp.float32)[:, None, :] * found, axis=2), 0)
    R = rows.shape[0]
    of_row = jnp.zeros(R, jnp.float32).at[jnp.where(has_row, places.positions, R)].set(weights, mode="drop")
    drows = jnp.where(_inside(places)[:, None], of_row[:, None] * dout[_tokens(places, dout)].astype(jnp.float32), 0)
    return drows.astype(rows.dtype), dweights


def _inside(places: Places) -> jax.Array:
    """[R]: which rows lie in a group."""
    R = places.indices.shape[0]
    lo, hi = clip_bounds(places.offsets[0], places.offsets[-1], R)
    row = jnp.arange(R, dtype=jnp.int32)
    return (row >= lo) & (row < hi)


def _tokens(places: Places, x: jax.Array) -> jax.Array:
    return jnp.clip(places.indices, 0, x.shape[0] - 1)


def _gather(rows: jax.Array, places: Places) -> tuple[jax.Array, jax.Array]:
    """Which choices have a row [T, k], and those rows in float32, zero for the others [T, k, D]."""
    R = rows.shape[0]
    lo, hi = clip_bounds(places.offsets[0], places.offsets[-1], R)
    has_row = (places.positions >= lo) & (places.positions < hi)
    return has_row, jnp.where(has_row[:, :, None], rows[jnp.clip(places.positions, 0, R - 1)].astype(jnp.float32), 0)
