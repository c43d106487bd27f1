"""The backward through the activation, and what tells tokens' choices from rows: elementwise work that XLA compiles, for every backend."""

import jax
import jax.numpy as jnp

from jaxops._lib.activations import unit_gradients
from jaxops._lib.ragged import clip_bounds
from jaxops.ops.route import Routing


def unit_bwd_xla(
    activation: str, dh: jax.Array, gate: jax.Array, up: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """dh [R, F] before the router's weights; gate, up [R, F]; weights [R] of the rows -> the gradients of gate and up, the weighted unit (all [R, F]), and
    [1, R] float32, the weights' gradients. Outside the groups all of it is zero."""
    dtype, dh, weights = gate.dtype, dh.astype(jnp.float32), weights[:, None]
    # Of a cotangent of one, up's gradient is the activation, and times up the unit.
    _, value = unit_gradients(activation, gate, up, jnp.ones_like(dh))
    h = value * up.astype(jnp.float32)
    dgate, dup = unit_gradients(activation, gate, up, weights * dh)
    return dgate.astype(dtype), dup.astype(dtype), (weights * h).astype(dtype), jnp.sum(dh * h, axis=1)[None]


def _bounds(routing: Routing) -> tuple[jax.Array, jax.Array]:
    return clip_bounds(routing.group_offsets[0], routing.group_offsets[-1], routing.row_indices.shape[0])


def weights_of_rows(routing: Routing) -> jax.Array:
    """[R] float32, each row's router weight; zero outside the groups. By gathers: each row looks through its token's choices for itself."""
    R, T = routing.row_indices.shape[0], routing.weights.shape[0]
    row = jnp.arange(R, dtype=jnp.int32)
    first, end = _bounds(routing)
    token = jnp.clip(routing.row_indices, 0, T - 1)
    mine = (routing.row_positions[token] == row[:, None]) & ((row >= first) & (row < end))[:, None]
    return jnp.sum(jnp.where(mine, routing.weights[token], 0), axis=1)


def of_choices(rows: jax.Array, routing: Routing) -> jax.Array:
    """[T, k], what [.., R] sums to in each choice's row; zero for a choice without one."""
    first, end = _bounds(routing)
    has_row = (routing.row_positions >= first) & (routing.row_positions < end)
    return jnp.where(has_row, jnp.sum(rows, axis=0)[jnp.clip(routing.row_positions, 0, rows.shape[1] - 1)], 0)
