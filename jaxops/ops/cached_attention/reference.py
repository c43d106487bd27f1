"""The op in float32 and plain jnp, for tests; JAX differentiates it."""

import jax
import jax.numpy as jnp


def cached_attention_reference(q, k, v, k_cache, v_cache, at, *, scale=None, window=None, sinks=None):
    """float32 results; arguments as `jaxops.cached_attention`. The sinks are one more column of scores."""
    (B, N, H), S = q.shape, k_cache.shape[2]
    token, place = jnp.arange(S)[None, :], at[:, None]
    own, shared = (token == place)[:, None, :, None], N // max(k.shape[1], 1)
    caches = [jnp.where(own, x[:, :, None, :], cache).astype(jnp.float32) for x, cache in ((k, k_cache), (v, v_cache))]
    seen = (token <= place) & (place < S)
    if window is not None:
        seen &= token >= place - window
    seen = seen[:, None, :]
    keys, values = (jnp.repeat(jnp.where(seen[..., None], x, 0), shared, axis=1) for x in caches)
    queries = jnp.where(jnp.any(seen, axis=2, keepdims=True), q.astype(jnp.float32), 0)
    scores = jnp.einsum("bnh,bnsh->bns", queries, keys, precision="highest")
    scores = jnp.where(seen, scores * (max(H, 1) ** -0.5 if scale is None else scale), -1e30)
    none = jnp.full(N, -1e30) if sinks is None else sinks.astype(jnp.float32)
    column = jnp.broadcast_to(none[None, :, None], (B, N, 1))
    weights = jnp.where(seen, jax.nn.softmax(jnp.concatenate([scores, column], axis=2), axis=2)[:, :, :S], 0)
    return jnp.einsum("bns,bnsh->bnh", weights, values, precision="highest"), *caches
