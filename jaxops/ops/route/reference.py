"""The op in plain jnp and float32; its gradient is JAX autodiff's. For tests: it allocates [T, k, E]."""

import jax
import jax.numpy as jnp

from jaxops.ops.route.plan import Spec
from jaxops.ops.route.routing import Routing, partial_routing


def route_reference(
    spec: Spec, logits: jax.Array, selection_bias: jax.Array | None = None, mask: jax.Array | None = None
) -> Routing:
    """As `jaxops.route` for T > 0: sorts each token's experts, and counts tokens in matrices of ones and zeros."""
    (T, E), capacity = logits.shape, spec.capacity or logits.shape[0]
    mask = jnp.ones(T, bool) if mask is None else mask
    logits = jnp.where(mask[:, None], logits.astype(jnp.float32), 0)
    logs = _logs_of(spec.score, logits)
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

    load, rows = _rows_of(experts, jnp.broadcast_to(mask[:, None], experts.shape), E, capacity)
    chosen_logs = jnp.take_along_axis(logs, experts, axis=1)
    weights = jax.nn.softmax(chosen_logs) if spec.normalize else jnp.exp(chosen_logs)
    weights = jnp.where(rows["row_positions"] < T * spec.k, weights * spec.weight_scale, 0)
    return Routing(weights, experts, load=load, **rows, **_losses_of(spec.score, logits, mask, load))


def choices_reference(
    experts: jax.Array, weights: jax.Array, E: int, mask: jax.Array | None = None, logits: jax.Array | None = None,
    score: str = "softmax",
) -> Routing:  # fmt: skip
    """As `jaxops.route_choices`."""
    T, k = experts.shape
    mask = jnp.ones(T, bool) if mask is None else mask
    valid = mask[:, None] & (experts >= 0) & (experts < E)
    load, rows = _rows_of(experts, valid, E, T * k)
    losses = {}
    if logits is not None:
        losses = _losses_of(score, jnp.where(mask[:, None], logits.astype(jnp.float32), 0), mask, load)
    weights = jnp.where(valid, weights.astype(jnp.float32), 0)
    return partial_routing(weights=weights, experts=experts, load=load, **rows, **losses)


def _logs_of(score: str, logits: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits) if score == "softmax" else jax.nn.log_sigmoid(logits)


def _rows_of(experts: jax.Array, valid: jax.Array, E: int, capacity: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The load, and the rows of the valid choices [T, k]."""
    (T, k), R = experts.shape, experts.size
    member = (valid[:, :, None] & (experts[:, :, None] == jnp.arange(E)[None, None, :])).reshape(R, E)
    load = member.sum(axis=0).astype(jnp.int32)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(jnp.minimum(load, capacity))]).astype(jnp.int32)
    rank = jnp.sum(jnp.where(member, jnp.cumsum(member, axis=0) - 1, 0), axis=1).reshape(T, k)
    kept = valid & (rank < capacity)
    positions = jnp.where(kept, offsets[jnp.clip(experts, 0, E)] + rank, R).astype(jnp.int32)
    token = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[:, None], positions.shape)
    indices = jnp.zeros(R + 1, jnp.int32).at[positions].set(token)[:R]
    return load, {"row_indices": indices, "row_positions": positions, "group_offsets": offsets}


def _losses_of(score: str, logits: jax.Array, mask: jax.Array, load: jax.Array) -> dict[str, jax.Array]:
    tokens = jnp.maximum(jnp.sum(mask), 1)
    shares = jnp.where(mask[:, None], jax.nn.softmax(_logs_of(score, logits)), 0).sum(axis=0) / tokens
    aux_loss = logits.shape[1] * jnp.sum(load / jnp.maximum(jnp.sum(load), 1) * shares)
    squares = jnp.where(mask, jax.nn.logsumexp(logits, axis=1) ** 2, 0)
    return {"aux_loss": aux_loss, "z_loss": jnp.sum(squares) / tokens}
