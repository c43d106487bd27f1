"""The portable backend: top_k, one stable sort of the choices, and JAX's own gradients."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxops.ops.route.keys import GONE, keys_of
from jaxops.ops.route.plan import TINY, Spec
from jaxops.ops.route.routing import Routing


def forward_xla(spec: Spec, logits: jax.Array, selection_bias: jax.Array | None) -> Routing:
    (T, E), k = logits.shape, spec.k
    logits = logits.astype(jnp.float32)
    experts = _choose(spec, logits, selection_bias)
    flat = experts.reshape(-1)
    # Stable: within an expert in the order of tokens, which choose an expert at most once.
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    offsets = jnp.searchsorted(flat[order], jnp.arange(E + 1, dtype=jnp.int32)).astype(jnp.int32)
    load = jnp.diff(offsets)
    row = jnp.arange(T * k, dtype=jnp.int32)
    positions = jnp.zeros_like(order).at[order].set(row, unique_indices=True).reshape(T, k)
    indices = order // k
    if spec.capacity is not None:
        rank = positions - offsets[experts]
        offsets = jnp.concatenate([offsets[:1], jnp.cumsum(jnp.minimum(load, spec.capacity), dtype=jnp.int32)])
        positions = jnp.where(rank < spec.capacity, offsets[experts] + rank, T * k)
        token = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[:, None], (T, k))
        indices = jnp.zeros_like(indices).at[positions].set(token, mode="drop")
    weights, aux_loss, z_loss = _weights_and_losses(spec, logits, experts, positions, load)
    return Routing(weights, experts, indices, positions, offsets, load, aux_loss, z_loss)


def backward_xla(spec: Spec, logits: jax.Array, routing: Routing, cotangents: Routing) -> jax.Array:
    """The gradient of logits [T, E], in their dtype."""

    def smooth(logits):
        choice = routing.experts, routing.row_positions, routing.load
        return _weights_and_losses(spec, logits.astype(jnp.float32), *choice)

    _, vjp = jax.vjp(smooth, logits)
    return vjp((cotangents.weights, cotangents.aux_loss, cotangents.z_loss))[0]


def _choose(spec: Spec, logits: jax.Array, selection_bias: jax.Array | None) -> jax.Array:
    """[T, k] int32."""
    T, E = logits.shape
    # Scores rise with their logits: without a bias, compare the logits, so that rounding makes no ties.
    keys = keys_of(logits)
    if selection_bias is not None or spec.expert_groups > 1:
        scores = jax.nn.softmax(logits) if spec.score == "softmax" else jax.nn.sigmoid(logits)
        if selection_bias is not None:
            scores = scores + selection_bias[None, :]
            keys = keys_of(scores)
        if spec.expert_groups > 1:
            size = E // spec.expert_groups
            grouped = jnp.where(scores == scores, scores, -jnp.inf).reshape(T, spec.expert_groups, size)
            best_two, _ = lax.top_k(grouped, min(2, size))
            _, best = lax.top_k(keys_of(jnp.sum(best_two, axis=2)), spec.top_expert_groups)
            allowed = jnp.any(best[:, :, None] == jnp.arange(spec.expert_groups)[None, None, :], axis=1)
            keys = jnp.where(jnp.repeat(allowed, size, axis=1), keys, GONE)
    return lax.top_k(keys, spec.k)[1].astype(jnp.int32)


@jax.custom_jvp
def _over_their_sum(scores: jax.Array) -> jax.Array:
    """Each row's scores over their sum. JAX's own derivative squares the sum: NaN for scores that underflow."""
    return scores / (jnp.sum(scores, axis=1, keepdims=True) + TINY)


@_over_their_sum.defjvp
def _over_their_sum_jvp(primals, tangents):
    (scores,), (change,) = primals, tangents
    shares, total = _over_their_sum(scores), jnp.sum(scores, axis=1, keepdims=True) + TINY
    return shares, (change - shares * jnp.sum(change, axis=1, keepdims=True)) / total


def _weights_and_losses(
    spec: Spec, logits: jax.Array, experts: jax.Array, positions: jax.Array, load: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The differentiable part of a Routing, from float32 logits and the choice."""
    T, E = logits.shape
    shares = scores = jax.nn.softmax(logits)
    if spec.score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        shares = _over_their_sum(scores)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if spec.normalize:
        weights = _over_their_sum(weights)
    weights = weights * spec.weight_scale
    if spec.capacity is not None:
        weights = jnp.where(positions < T * spec.k, weights, 0)
    tokens = max(1, T)  # both losses are 0 without tokens
    aux_loss = (E / (tokens * tokens * spec.k)) * jnp.sum(load.astype(jnp.float32) * jnp.sum(shares, axis=0))
    return weights, aux_loss, jnp.sum(jax.nn.logsumexp(logits, axis=1) ** 2) / tokens
