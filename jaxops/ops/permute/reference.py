"""The ops in plain jnp and float32; their gradients are JAX autodiff's."""

import jax
import jax.numpy as jnp

from jaxops.ops.route import Routing


def permute_reference(x: jax.Array, routing: Routing) -> jax.Array:
    """rows [R, D] of x [T, D]."""
    row = jnp.arange(routing.row_indices.shape[0])
    inside = (row >= routing.group_offsets[0]) & (row < routing.group_offsets[-1])
    return jnp.where(inside[:, None], x.astype(jnp.float32)[routing.row_indices], 0)


def combine_reference(rows: jax.Array, routing: Routing) -> jax.Array:
    """[T, D] of rows [R, D], adding one choice of all tokens after another."""
    out = jnp.zeros((routing.row_positions.shape[0], rows.shape[1]), jnp.float32)
    for j in range(routing.row_positions.shape[1]):
        position = routing.row_positions[:, j]
        has_row = (position >= routing.group_offsets[0]) & (position < routing.group_offsets[-1])
        row = jnp.where(has_row[:, None], rows.astype(jnp.float32)[jnp.where(has_row, position, 0)], 0)
        out = out + jnp.where(has_row, routing.weights[:, j], 0)[:, None] * row
    return out
