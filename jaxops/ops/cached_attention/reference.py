"""The op in float32 and plain jnp, for tests; JAX differentiates it."""

import jax
import jax.numpy as jnp


def cached_attention_reference(
    qkv, k_cache, v_cache, at, *, qk_norm=None, epsilon=1e-6, rotary=None, scale=None, window=None, sinks=None
):
    """float32 results; arguments as `jaxops.cached_attention`. The sinks are one more column of scores."""
    (B, _, H), (K, S) = qkv.shape, k_cache.shape[1:3]
    N = qkv.shape[1] - 2 * K
    q, k, v = jnp.split(qkv.astype(jnp.float32), [N, N + K], axis=1)
    if qk_norm is not None:
        q, k = (_normalized(x, weight, epsilon) for x, weight in zip((q, k), qk_norm, strict=True))
    if rotary is not None:
        q, k = (_rotated(x, *rotary) for x in (q, k))
    token, place = jnp.arange(S)[None, :], at[:, None]
    own, shared = (token == place)[:, None, :, None], N // max(K, 1)
    caches = [jnp.where(own, x[:, :, None, :], cache).astype(jnp.float32) for x, cache in ((k, k_cache), (v, v_cache))]
    seen = (token <= place) & (place < S)
    if window is not None:
        seen &= token >= place - min(window, S)
    seen = seen[:, None, :]
    keys, values = (jnp.repeat(jnp.where(seen[..., None], x, 0), shared, axis=1) for x in caches)
    queries = jnp.where(jnp.any(seen, axis=2, keepdims=True), q.astype(jnp.float32), 0)
    scores = jnp.einsum("bnh,bnsh->bns", queries, keys, precision="highest")
    scores = jnp.where(seen, scores * (max(H, 1) ** -0.5 if scale is None else scale), -1e30)
    none = jnp.full(N, -1e30) if sinks is None else sinks.astype(jnp.float32)
    column = jnp.broadcast_to(none[None, :, None], (B, N, 1))
    weights = jnp.where(seen, jax.nn.softmax(jnp.concatenate([scores, column], axis=2), axis=2)[:, :, :S], 0)
    return jnp.einsum("bns,bnsh->bnh", weights, values, precision="highest"), *caches


def _normalized(x, weight, epsilon):
    return x / jnp.sqrt(jnp.mean(x**2, axis=2, keepdims=True) + epsilon) * weight.astype(jnp.float32)[None, None, :]


def _rotated(x, cos, sin):
    """Pairs of features as complex numbers."""
    half, turn = cos.shape[1], jax.lax.complex(cos.astype(jnp.float32), sin.astype(jnp.float32))
    turned = jax.lax.complex(x[:, :, :half], x[:, :, half : 2 * half]) * turn[:, None, :]
    return jnp.concatenate([turned.real, turned.imag, x[:, :, 2 * half :]], axis=2)
