"""Elementwise work and gathers: the gated unit and its backward, and values of choices as values of rows and back."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.numerics.activations import activate, activate_and_slope, unit, unit_gradients
from jaxops.ops.route import Routing, choices_with_row


def unit_xla(activation: str, gate: jax.Array, up: jax.Array | None = None) -> jax.Array:
    """The gated unit, or without up the activation, computed in float32, in gate's dtype; differentiable to any
    order."""
    value = activate(gate.astype(jnp.float32), activation)
    return (value if up is None else value * up.astype(jnp.float32)).astype(gate.dtype)


def unit_bwd_xla(
    activation: str, form: str, dh: jax.Array, pre: tuple[jax.Array, ...], weights: jax.Array
) -> tuple[jax.Array, ...]:
    """dh [R, F] before the router's weights; pre: gate and up [R, F], or "joined" [R, 2 F], or of experts without a
    gate, "alone", [R, F]; weights [R] of the rows -> the gradients of pre, the weighted unit [R, F], and the weights'
    gradients [1, R] float32. Unspecified outside the groups."""
    dtype, dh, weights = pre[0].dtype, dh.astype(jnp.float32), weights[:, None]
    if form == "alone":
        h, slope = activate_and_slope(pre[0].astype(jnp.float32), activation)
        assert slope is not None
        dpre = [weights * dh * slope]
    else:
        gate, up = jnp.split(pre[0], 2, axis=1) if form == "joined" else pre
        h, dpre = unit(activation, gate, up), unit_gradients(activation, gate, up, weights * dh)
    dpre = [d.astype(dtype) for d in dpre]
    dpre = [jnp.concatenate(dpre, axis=1)] if form == "joined" else dpre
    return *dpre, (weights * h).astype(dtype), jnp.sum(dh * h, axis=1)[None]


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


def products_with_bias(dout: jax.Array, bias: jax.Array, routing: Routing, precision: lax.Precision) -> jax.Array:
    """[T, k] float32, each choice's sum of dout [T, N] times its expert's bias of [E, N]; zero for a choice without a
    row. One product with all experts, of which the choices' are taken."""
    how = {"precision": precision, "preferred_element_type": jnp.float32}
    every = lax.dot_general(dout, bias.astype(dout.dtype), (((1,), (1,)), ((), ())), **how)
    at = jnp.searchsorted(routing.group_offsets, routing.row_positions, side="right", method="compare_all") - 1
    chosen = jnp.take_along_axis(every, jnp.clip(at, 0, bias.shape[0] - 1), axis=1)
    return jnp.where(choices_with_row(routing), chosen, 0)
