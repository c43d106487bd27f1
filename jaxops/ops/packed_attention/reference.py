"""The op in float32 and plain jnp, for tests; JAX differentiates it. It holds [heads, T, S] scores in memory."""

import jax
import jax.numpy as jnp


def packed_attention_reference(
    q, k, v, sequence_offsets, *, kv_offsets=None, scale=None, sinks=None, soft_cap=None, **masks
) -> jax.Array:
    """float32 [T, heads, value_dim]; arguments as `jaxops.packed_attention`."""
    keys = sequence_offsets if kv_offsets is None else kv_offsets
    (T, heads, head_dim), S = q.shape, k.shape[0]
    s = jnp.arange(S)[None, :]
    mask = _mask(jnp.arange(T)[:, None], s, sequence_offsets, keys, **masks)
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    queried, seen = jnp.any(mask, axis=1), (keys[0] <= s[0]) & (s[0] < keys[-1])
    q = jnp.where(queried[:, None, None], q, 0)
    shared = heads // max(k.shape[1], 1)
    k, v = (jnp.repeat(jnp.where(seen[:, None, None], x, 0), shared, axis=1) for x in (k, v))
    scores = jnp.einsum("tnh,snh->nts", q, k, precision="highest")
    scores = scores * (max(head_dim, 1) ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    top = jnp.max(scores, axis=2, keepdims=True, initial=float(jnp.finfo(jnp.float32).min), where=mask)
    total = 0.0
    if sinks is not None:
        top = jnp.maximum(top, sinks[:, None, None])
        total = jnp.exp(sinks[:, None, None] - top)
    exponentials = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0)
    total += jnp.sum(exponentials, axis=2, keepdims=True)
    weights = exponentials / jnp.where(queried[:, None], total, 1)
    return jnp.where(queried[:, None, None], jnp.einsum("nts,snh->tnh", weights, v, precision="highest"), 0)


def _mask(t, s, offsets, keys, causal=False, window=None, visible_until=None) -> jax.Array:
    """Bool [T, S]: which keys s [1, S] each row t [T, 1] sees."""
    mask = jnp.zeros((t.shape[0], s.shape[1]), bool)
    for b in range(offsets.shape[0] - 1):  # sequence by sequence, as the mask is defined
        start, stop, ends = keys[b], keys[b + 1], offsets[b + 1]
        mine = (offsets[b] <= t) & (t < ends) & (start <= s) & (s < stop)
        ahead = (stop - s) - (ends - t)  # of the last row that both have: below 0 for a later key
        if causal:
            mine &= ahead >= 0
        if visible_until is not None:
            mine &= s < visible_until[:, None]
        if window is not None:
            mine &= ahead <= window
            if not causal and visible_until is None:
                mine &= ahead >= -window
        mask |= mine
    return mask
