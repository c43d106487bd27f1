"""Elementwise work and gathers: the gated unit and its backward, and values of choices as values of rows and back."""

import jax
import jax.numpy as jnp

from jaxops._lib.numerics.activations import activate, unit_gradients
from jaxops.ops.route import Routing, choices_with_row


def unit_xla(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The gated unit, computed in float32, in gate's dtype; differentiable to any order."""
    return (activate(gate.astype(jnp.float32), activation) * up.astype(jnp.float32)).astype(gate.dtype)


def unit_bwd_xla(
    activation: str, dh: jax.Array, gate: jax.Array, up: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """dh [R, F] before the router's weights; gate, up [R, F]; weights [R] of the rows -> the gradients of gate and up,
    the weighted unit (all [R, F]), and the weights' gradients [1, R] float32. Unspecified outside the groups."""
    dtype, dh, weights = gate.dtype, dh.astype(jnp.float32), weights[:, None]
    # For a cotangent of one, up's gradient is the activated gate.
    _, activated = unit_gradients(activation, gate, up, jnp.ones_like(dh))
    h = activated * up.astype(jnp.float32)
    dgate, dup = unit_gradients(activation, gate, up, weights * dh)
    return dgate.astype(dtype), dup.astype(dtype), (weights * h).astype(dtype), jnp.sum(dh * h, axis=1)[None]


def weights_of_rows(routing: Routing) -> jax.Array:
    """[R] float32, each row's router weight; unspecified outside the groups. Gathers only: each row compares its number
    with the positions of its token's choices."""
    row = jnp.arange(routing.row_indices.shape[0], dtype=jnp.int32)[:, None]
    token = jnp.clip(routing.row_indices, 0, routing.weights.shape[0] - 1)
    return jnp.sum(jnp.where(routing.row_positions[token] == row, routing.weights[token], 0), axis=1)


def sums_of_choices(dots: jax.Array, routing: Routing) -> jax.Array:
    """[T, k], the sum of dots [.., R] over the first axis in each choice's row; zero for a choice without a row."""
    position = jnp.clip(routing.row_positions, 0, dots.shape[1] - 1)
    return jnp.where(choices_with_row(routing), jnp.sum(dots, axis=0)[position], 0)
