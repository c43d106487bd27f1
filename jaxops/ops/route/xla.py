"""The portable backend: top_k, one stable sort of the choices, and JAX's own gradients."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.symbolic import is_symbolic
from jaxops.ops.route.plan import TINY, Spec
from jaxops.ops.route.routing import Routing, partial_routing
from jaxops.ops.route.scores import GONE, keys_of, loss_factors

_LOWEST = float(jnp.finfo(jnp.float32).min)


SORTED = ("row_indices", "row_positions", "group_offsets", "load")


def sort_choices(experts: jax.Array, E: int, *, all_valid: bool) -> Routing:
    """The rows of choices [T, k], sorted by expert: the fields `SORTED` of a Routing.

    all_valid: no choice is E; otherwise one that is E has no row.
    """
    (T, k), flat = experts.shape, experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)  # stable: within an expert in the order of tokens
    numbers = jnp.arange(E + 1, dtype=jnp.int32)
    if is_symbolic(T):  # a search has a number of steps
        offsets = jnp.sum(flat[None, :] < numbers[:, None], axis=1, dtype=jnp.int32)
    else:
        offsets = jnp.searchsorted(flat[order], numbers).astype(jnp.int32)
    row = jnp.arange(T * k, dtype=jnp.int32)
    positions = jnp.zeros_like(order).at[order].set(row, unique_indices=True).reshape(T, k)
    indices = order // k
    if not all_valid:
        positions = jnp.where(experts < E, positions, T * k)
        indices = jnp.where(row < offsets[-1], indices, 0)
    return partial_routing(row_indices=indices, row_positions=positions, group_offsets=offsets, load=jnp.diff(offsets))


def forward_xla(
    spec: Spec, logits: jax.Array, selection_bias: jax.Array | None, mask: jax.Array | None = None
) -> Routing:
    (T, E), k = logits.shape, spec.k
    logits = counted(logits, mask)
    experts = chosen = _choose(spec, logits, selection_bias)
    if mask is not None:
        experts = jnp.where(mask[:, None], chosen, jnp.arange(k, dtype=jnp.int32)[None, :])
        chosen = jnp.where(mask[:, None], chosen, E)
    sorted_rows = sort_choices(chosen, E, all_valid=mask is None)
    indices, positions, offsets, load = (getattr(sorted_rows, name) for name in SORTED)
    if spec.capacity is not None:
        rank = positions - offsets[experts]
        offsets = jnp.concatenate([offsets[:1], jnp.cumsum(jnp.minimum(load, spec.capacity), dtype=jnp.int32)])
        positions = jnp.where(rank < spec.capacity, offsets[experts] + rank, T * k)
        token = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[:, None], (T, k))
        indices = jnp.zeros_like(indices).at[positions].set(token, mode="drop")
    weights, aux_loss, z_loss = _weights_and_losses(spec, logits, experts, positions, load, mask)
    return Routing(weights, experts, indices, positions, offsets, load, aux_loss, z_loss)


def backward_xla(
    spec: Spec, logits: jax.Array, mask: jax.Array | None, routing: Routing, cotangents: Routing
) -> jax.Array:
    """The gradient of logits [T, E], in their dtype."""

    def smooth(logits):
        choice = routing.experts, routing.row_positions, routing.load
        return _weights_and_losses(spec, counted(logits, mask), *choice, mask)

    _, vjp = jax.vjp(smooth, logits)
    return vjp((cotangents.weights, cotangents.aux_loss, cotangents.z_loss))[0]


def _choose(spec: Spec, logits: jax.Array, selection_bias: jax.Array | None) -> jax.Array:
    """[T, k] int32."""
    # Scores rise with their logits: without a bias, compare the logits, so that rounding makes no ties.
    (T, E), keys, groups = logits.shape, keys_of(logits), spec.expert_groups
    if selection_bias is None:
        scores = jax.nn.softmax(logits) if spec.score == "softmax" else _values(jax.nn.log_sigmoid(logits))
    else:
        scores = (jax.nn.softmax if spec.score == "softmax" else jax.nn.sigmoid)(logits) + selection_bias[None, :]
        keys = keys_of(scores)
    if groups > 1:
        grouped = jnp.where(scores == scores, scores, -jnp.inf).reshape(T, groups, E // groups)
        best_two, _ = lax.top_k(grouped, min(2, E // groups))
        _, best = lax.top_k(keys_of(jnp.sum(best_two, axis=2)), spec.top_expert_groups)
        allowed = jnp.any(best[:, :, None] == jnp.arange(groups)[None, None, :], axis=1)
        keys = jnp.where(jnp.repeat(allowed, E // groups, axis=1), keys, GONE)
    return lax.top_k(keys, spec.k)[1].astype(jnp.int32)


def counted(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The logits in float32; zeros for tokens that do not count, whose values then reach no result and no gradient."""
    logits = logits.astype(jnp.float32)
    return logits if mask is None else jnp.where(mask[:, None], logits, 0)


def _values(logs: jax.Array) -> jax.Array:
    """Scores of these logarithms, times a number of the token with which the largest one is 1; all may be 0. So they
    are right also where float32 has no such small scores."""
    top = jnp.max(logs, axis=1, keepdims=True, initial=_LOWEST, where=logs == logs)  # not a NaN
    return jnp.exp(logs - lax.stop_gradient(top))


def _over_their_sum(logs: jax.Array) -> jax.Array:
    values = _values(logs)
    return values / (jnp.sum(values, axis=1, keepdims=True) + TINY)


def mean_shares(score: str, logits: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """[E] float32, the P of `Routing.aux_loss`: the mean over the tokens of each one's scores over their sum."""
    (T, E), tokens = logits.shape, None if mask is None else jnp.sum(mask, dtype=jnp.int32)
    _, mean = loss_factors(T, E, 1, tokens)
    return jnp.sum(_shares(score, counted(logits, mask), mask), axis=0) * mean


def _shares(score: str, logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Each token's scores over their sum; 0 for tokens that do not count."""
    shares = jax.nn.softmax(logits) if score == "softmax" else _over_their_sum(jax.nn.log_sigmoid(logits))
    return shares if mask is None else jnp.where(mask[:, None], shares, 0)


def _weights_and_losses(
    spec: Spec, logits: jax.Array, experts: jax.Array, positions: jax.Array, load: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The differentiable part of a Routing, from float32 logits and the choice."""
    (T, _), k = logits.shape, spec.k
    # log_softmax of all experts, though quotients do not need it: a NaN anywhere is one of all the token's scores.
    logs = (jax.nn.log_softmax if spec.score == "softmax" else jax.nn.log_sigmoid)(logits)
    chosen = jnp.take_along_axis(logs, experts, axis=1)
    weights = _over_their_sum(chosen) if spec.normalize else jnp.exp(chosen)
    weights = weights * spec.weight_scale
    if spec.capacity is not None or mask is not None:
        weights = jnp.where(positions < T * k, weights, 0)
    tokens = None if mask is None else jnp.sum(load, dtype=jnp.int32) // k
    return weights, *losses(spec.score, k, logits, load, mask, tokens)


def losses(
    score: str, k: int, logits: jax.Array, load: jax.Array, mask: jax.Array | None, tokens: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """aux_loss and z_loss of a Routing, from logits as of `counted`. tokens: how many count; None for all."""
    T, E = logits.shape
    aux, z = loss_factors(T, E, k, tokens)
    squares = jax.nn.logsumexp(logits, axis=1) ** 2
    if mask is not None:
        squares = jnp.where(mask, squares, 0)
    aux_loss = aux * jnp.sum(load.astype(jnp.float32) * jnp.sum(_shares(score, logits, mask), axis=0))
    return aux_loss, jnp.sum(squares) * z
