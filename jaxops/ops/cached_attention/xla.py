"""The portable backend: norms, rotations, a scatter, two products and a softmax."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.planning.traced_once import traced_once

Attended = tuple[jax.Array, jax.Array, jax.Array]  # the result and the two caches


class Options(NamedTuple):
    """What a call computes, as far as it is static.

    Attributes:
      epsilon: of the norms of queries and keys.
      compute: the name of the dtype in which the two products are.
    """

    scale: float
    epsilon: float
    window: int | None
    precision: lax.Precision
    compute: str

    def seen(self, S: int) -> int:
        """How many of S cached tokens a row sees at the most; its own is one of them."""
        return S if self.window is None else min(S, self.window + 1)


@traced_once("options")
def cached_xla(options: Options, qkv, k_cache, v_cache, at, sinks, qk_norm, rotary) -> Attended:
    (B, _, H), (_, K, S, _) = qkv.shape, k_cache.shape
    N = qkv.shape[1] - 2 * K
    inside = (at >= 0) & (at < S)
    # Ones for other rows: a norm of zeros would divide by epsilon, which may be 0.
    own = jnp.where(inside[:, None, None], qkv, 1).astype(jnp.float32)
    q, k, v = jnp.split(own, [N, N + K], axis=1)
    if qk_norm is not None:
        q, k = (_normalized(x, weight, options.epsilon) for x, weight in zip((q, k), qk_norm, strict=True))
    if rotary is not None:
        q, k = (_rotated(x, *rotary) for x in (q, k))
    q, k, v = (x.astype(k_cache.dtype) for x in (q, k, v))
    place = (jnp.arange(B, dtype=jnp.int32), slice(None), jnp.where(inside, at, S))  # out of bounds: dropped
    k_cache, v_cache = k_cache.at[place].set(k, mode="drop"), v_cache.at[place].set(v, mode="drop")
    token = jnp.arange(S, dtype=jnp.int32)[None, :]
    seen = (token <= at[:, None]) & inside[:, None]
    if options.window is not None:
        seen &= token >= at[:, None] - options.window
    seen = seen[:, None, :, None]  # of [B, K, S, H]
    keys, values = (jnp.where(seen, cache, 0) for cache in (k_cache, v_cache))
    q = jnp.where(inside[:, None, None], q, 0).reshape(B, K, N // max(K, 1), H)

    def product(equation: str, *operands: jax.Array) -> jax.Array:
        operands = tuple(x.astype(options.compute) for x in operands)
        return jnp.einsum(equation, *operands, precision=options.precision, preferred_element_type=jnp.float32)

    seen = jnp.swapaxes(seen, 2, 3)
    scores = jnp.where(seen, options.scale * product("bkgd,bksd->bkgs", q, keys), -math.inf)
    row_in = inside[:, None, None, None]
    top = jnp.where(row_in, jnp.max(scores, axis=3, keepdims=True, initial=-math.inf), 0)
    if sinks is not None:
        sinks = jnp.where(row_in, sinks.reshape(1, K, N // max(K, 1), 1), 0)
        top = jnp.maximum(top, sinks)
    top = lax.stop_gradient(top)
    shares = jnp.exp(scores - top)
    total = jnp.sum(shares, axis=3, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    shares = shares / jnp.where(row_in, total, 1)
    out = product("bkgs,bksd->bkgd", shares, values)
    return out.reshape(B, N, H).astype(qkv.dtype), k_cache, v_cache


def _normalized(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """The RMS norm of each head, float32 [B, heads, head_dim]."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=2, keepdims=True) + epsilon) * weight[None, None, :]


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The first features of each head, in two halves, turned by angles [B, features / 2]."""
    half, (cos, sin) = cos.shape[1], (turn[:, None, :] for turn in (cos, sin))
    a, b, rest = jnp.split(x, [half, 2 * half], axis=2)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=2)
