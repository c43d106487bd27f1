"""What the ops mean, in float32 and plain jnp; their gradients are JAX autodiff's."""

import jax
import jax.numpy as jnp

from jaxops.ops.permute.places import Places


def permute_reference(x: jax.Array, places: Places) -> jax.Array:
    """rows [R, D] of x [T, D]."""
    row = jnp.arange(places.indices.shape[0])
    inside = (row >= places.offsets[0]) & (row < places.offsets[-1])
    return jnp.where(inside[:, None], x.astype(jnp.float32)[places.indices], 0)


def combine_reference(rows: jax.Array, weights: jax.Array, places: Places) -> jax.Array:
    """[T, D] of rows [R, D] and weights [T, k], one choice of all tokens after another."""
    out = jnp.zeros((places.positions.shape[0], rows.shape[1]), jnp.float32)
    for j in range(places.positions.shape[1]):
        position = places.positions[:, j]
        has_row = (position >= places.offsets[0]) & (position < places.offsets[-1])
        row = jnp.where(has_row[:, None], rows.astype(jnp.float32)[jnp.where(has_row, position, 0)], 0)
        out = out + jnp.where(has_row, weights[:, j], 0)[:, None] * row
    return out
