"""The op in plain jnp and float32; its gradient is JAX autodiff's. For tests: it allocates [T, k, E]."""

import jax
import jax.numpy as jnp

from jaxops.ops.route.plan import Spec
from jaxops.ops.route.routing import Routing


def route_reference(
    spec: Spec, logits: jax.Array, selection_bias: jax.Array | None = None, mask: jax.Array | None = None
) -> Routing:
    """As `jaxops.route` for T > 0: sorts each token's experts, and counts tokens in matrices of ones and zeros."""
    T, E = logits.shape
    R, capacity = T * spec.k, spec.capacity or T
    mask = jnp.ones(T, bool) if mask is None else mask
    tokens = jnp.maximum(jnp.sum(mask), 1)
    logits = jnp.where(mask[:, None], logits.astype(jnp.float32), 0)
    logs = jax.nn.log_softmax(logits) if spec.score == "softmax" else jax.nn.log_sigmoid(logits)
    scores = jnp.exp(logs)

    def falling(values):
        """Sort keys for descending order; NaN as -inf."""
        return -jnp.where(jnp.isnan(values), -jnp.inf, jax.lax.stop_gradient(values))

    # The logits have the order of the scores, and keep it where scores round to equal numbers.
    biased = scores if selection_bias is None else scores + selection_bias[None, :]
    ranked = falling(logits if selection_bias is None else biased)
    size = E // spec.expert_groups
    groups = jnp.sort(falling(biased).reshape(T, spec.expert_groups, size), axis=2)[:, :, :2].sum(axis=2)
    best = jnp.argsort(groups, axis=1, stable=True)[:, : spec.top_expert_groups]
    excluded = jnp.all(best[:, :, None] != jnp.arange(E)[None, None, :] // size, axis=1)
    experts = jnp.lexsort((ranked, excluded), axis=1)[:, : spec.k].astype(jnp.int32)
    experts = jnp.where(mask[:, None], experts, jnp.arange(spec.k, dtype=jnp.int32)[None, :])

    member = mask[:, None, None] & (experts[:, :, None] == jnp.arange(E)[None, None, :])  # [T, k, E]
    chosen = member.sum(axis=1)
    load = chosen.sum(axis=0)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(jnp.minimum(load, capacity))]).astype(jnp.int32)
    rank = jnp.take_along_axis(jnp.cumsum(chosen, axis=0) - 1, experts, axis=1)
    kept = mask[:, None] & (rank < capacity)
    positions = jnp.where(kept, offsets[experts] + rank, R).astype(jnp.int32)
    token = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[:, None], positions.shape)
    indices = jnp.zeros(R + 1, jnp.int32).at[positions].set(token)[:R]

    chosen_logs = jnp.take_along_axis(logs, experts, axis=1)
    weights = jax.nn.softmax(chosen_logs) if spec.normalize else jnp.exp(chosen_logs)
    shares = jnp.where(mask[:, None], jax.nn.softmax(logs), 0).sum(axis=0) / tokens
    aux_loss = E * jnp.sum(load / (tokens * spec.k) * shares)
    z_loss = jnp.sum(jnp.where(mask, jax.nn.logsumexp(logits, axis=1) ** 2, 0)) / tokens
    weights, load = jnp.where(kept, weights * spec.weight_scale, 0), load.astype(jnp.int32)
    return Routing(weights, experts, indices, positions, offsets, load, aux_loss, z_loss)
