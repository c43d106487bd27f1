"""What a router decided: the pytree that `route` returns, and what its gradient needs of it."""

import dataclasses
from typing import NamedTuple

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """T tokens, each with its k choices among E experts: R = T * k rows in all, sorted by expert, within an expert by token.

    Row r of an expert's input is token `row_indices[r]`, and what comes out of it is added to that token with its weight:
    `out[t] = sum_j weights[t, j] * rows[row_positions[t, j]]`, where the choices with a position of R are left out.

    Attributes:
      weights: [T, k] float32, in the order of experts; 0 for a choice that capacity dropped. Differentiable in the logits.
      experts: [T, k] int32, each token's choices, the best one first; no two of a token are the same.
      row_indices: [R] int32, the token of each row. Rows from group_offsets[-1] on belong to no expert, and hold a 0: a token's number, so a gather is safe.
      row_positions: [T, k] int32, the row of each choice; R, one past the last row, for a choice that capacity dropped.
      group_offsets: [E + 1] int32, where each expert's rows start, and where the last one's end; below R only where capacity dropped something.
      load: [E] int32, how many tokens chose each expert, before capacity dropped any. They add up to R.
      aux_loss: float32 scalar, the load-balancing loss: E * sum_e load[e] / R * P[e], P[e] the mean over the tokens of each one's scores divided by their
        sum over all experts. 1 where the load is even.
      z_loss: float32 scalar, the mean over the tokens of logsumexp(logits)**2.
    """

    weights: jax.Array
    experts: jax.Array
    row_indices: jax.Array
    row_positions: jax.Array
    group_offsets: jax.Array
    load: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array


class Saved(NamedTuple):
    """What the backward reads: the logits [T, E] as they were given, and of their Routing what is no smooth function of them."""

    logits: jax.Array
    experts: jax.Array
    row_positions: jax.Array
    load: jax.Array


class Cotangents(NamedTuple):
    """Of the parts of a Routing that have a gradient, in their shapes, float32."""

    weights: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array
