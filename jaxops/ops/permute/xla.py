"""The portable backend: gathers and sums, without a scatter-add, whose order of additions is undefined on a GPU."""

import jax
import jax.numpy as jnp

from jaxops.ops.route import Routing, choices_with_row, rows_in_groups


def permute_xla(x: jax.Array, routing: Routing) -> jax.Array:
    """[R, D] in x's dtype."""
    return jnp.where(rows_in_groups(routing)[:, None], x[_tokens(routing)], 0)


def combine_xla(rows: jax.Array, routing: Routing, out_dtype) -> jax.Array:
    """[T, D]; without weights they are ones."""
    has_row, gathered = _gather(rows, routing)
    if routing.weights is not None:
        gathered = gathered * jnp.where(has_row, routing.weights, 0)[:, :, None]
    return jnp.sum(gathered, axis=1).astype(out_dtype)


def combine_bwd_xla(rows: jax.Array, routing: Routing, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(drows [R, D] in rows' dtype, dweights [T, k])"""
    has_row, gathered = _gather(rows, routing)
    dweights = jnp.where(has_row, jnp.sum(dout.astype(jnp.float32)[:, None, :] * gathered, axis=2), 0)
    R = rows.shape[0]
    position = jnp.where(has_row, routing.row_positions, R)
    weights = jnp.zeros(R, jnp.float32).at[position].set(routing.weights, mode="drop")
    drows = weights[:, None] * dout[_tokens(routing)].astype(jnp.float32)
    return jnp.where(rows_in_groups(routing)[:, None], drows, 0).astype(rows.dtype), dweights


def _tokens(routing: Routing) -> jax.Array:
    """[R] row_indices, clipped: wild ones give wrong rows, never an access out of bounds."""
    return jnp.clip(routing.row_indices, 0, routing.row_positions.shape[0] - 1)


def _gather(rows: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Which choices have a row [T, k], and those rows in float32, zeros for the others [T, k, D]."""
    has_row = choices_with_row(routing)
    gathered = rows[jnp.clip(routing.row_positions, 0, rows.shape[0] - 1)].astype(jnp.float32)
    return has_row, jnp.where(has_row[:, :, None], gathered, 0)
