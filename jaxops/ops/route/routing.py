"""`Routing`: the decision of a router, as a pytree."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.pytrees import register
from jaxops._lib.ragged.offsets import clip_bounds


@register
@typing.no_type_check  # JAX unflattens pytrees with placeholders and None, which a runtime type checker would refuse
@dataclasses.dataclass(frozen=True)
class Routing:
    """T tokens with k choices each among E experts: R = T * k rows, sorted by expert, within an expert by token.

    Row r of the experts' input is token `row_indices[r]`. Its output is added to that token with the router's weight:
    `out[t] = sum_j weights[t, j] * rows[row_positions[t, j]]`, without the choices whose position is R.

    Attributes:
      weights: [T, k] float32; 0 for a choice without a row. Differentiable in the logits.
      experts: [T, k] int32, each token's choices. From `route` the best one is the first, and all are different; from
        `route_choices` they are those that were passed.
      row_indices: [R] int32, the token of each row. Rows from group_offsets[-1] on belong to no expert and hold 0, a
        valid token for a gather.
      row_positions: [T, k] int32, the row of each choice; R for a choice that was dropped.
      group_offsets: [E + 1] int32, where each expert's rows start, then where the last one's end: R unless rows were
        dropped.
      load: [E] int32, how many of the tokens that count (all without a mask) chose each expert, dropped choices
        included. From `route` they add up to k times these tokens.
      aux_loss: float32 scalar, the load-balancing loss E * sum_e load[e] / sum(load) * P[e], where P[e] is the mean
        over the tokens that count of each token's score over the sum of its scores. 1 for an even load. None from
        `route_choices` without logits.
      z_loss: float32 scalar, the mean over the tokens that count of logsumexp(logits)**2, or None likewise.
    """

    weights: jax.Array
    experts: jax.Array
    row_indices: jax.Array
    row_positions: jax.Array
    group_offsets: jax.Array
    load: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array

    def own(self, experts: int, axis_name: str | tuple[str, ...]) -> "Routing":
        """The routing with the offsets of this device's experts, inside `jax.shard_map`: of `experts` on each device of
        axis_name. Other devices' rows then lie outside all groups."""
        first = lax.axis_index(axis_name) * experts
        offsets = lax.dynamic_slice_in_dim(self.group_offsets, first, experts + 1)
        return dataclasses.replace(self, group_offsets=offsets)


def partial_routing(**fields: jax.Array) -> Routing:
    """A Routing with these fields and None for the others, which then are no leaves of the pytree: the part that an op
    reads (JAX would keep the whole as residuals), or the cotangent of a Routing, where None is zero."""
    return Routing(**{field.name: fields.get(field.name) for field in dataclasses.fields(Routing)})  # pyright: ignore[reportArgumentType]


def rows_in_groups(routing: Routing) -> jax.Array:
    """[R], which rows lie in a group. (A slice of the offsets may start after row 0.)"""
    R = routing.row_indices.shape[0]
    first, end = clip_bounds(routing.group_offsets[0], routing.group_offsets[-1], R)
    row = jnp.arange(R, dtype=jnp.int32)
    return (row >= first) & (row < end)


def choices_with_row(routing: Routing) -> jax.Array:
    """[T, k], which choices have a row that lies in a group."""
    first, end = clip_bounds(routing.group_offsets[0], routing.group_offsets[-1], routing.row_indices.shape[0])
    return (routing.row_positions >= first) & (routing.row_positions < end)
