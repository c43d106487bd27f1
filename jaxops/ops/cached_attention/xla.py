"""The portable backend: a scatter, two products and a softmax."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Attended = tuple[jax.Array, jax.Array, jax.Array]  # the result and the two caches


class How(NamedTuple):
    """What is static of a call.

    Attributes:
      kernel: whether the Pallas kernel runs: on a GPU, or (interpret) in Pallas' interpreter.
      cores: multiprocessors of the device.
    """

    scale: float
    window: int | None
    precision: lax.Precision
    kernel: bool
    interpret: bool
    cores: int


def cached_xla(how: How, q, k, v, k_cache, v_cache, at, sinks) -> Attended:
    (B, N, H), (_, K, S, _) = q.shape, k_cache.shape
    inside = (at >= 0) & (at < S)
    place = (jnp.arange(B, dtype=jnp.int32), slice(None), jnp.where(inside, at, S))  # out of bounds: dropped
    k_cache, v_cache = k_cache.at[place].set(k, mode="drop"), v_cache.at[place].set(v, mode="drop")
    token = jnp.arange(S, dtype=jnp.int32)[None, :]
    seen = (token <= at[:, None]) & inside[:, None]
    if how.window is not None:
        seen &= token >= at[:, None] - how.window
    seen = seen[:, None, :, None]  # of [B, K, S, H]
    keys, values = (jnp.where(seen, cache, 0) for cache in (k_cache, v_cache))
    q = jnp.where(inside[:, None, None], q, 0).reshape(B, K, N // max(K, 1), H)
    product = functools.partial(jnp.einsum, precision=how.precision, preferred_element_type=jnp.float32)
    seen = jnp.swapaxes(seen, 2, 3)
    scores = jnp.where(seen, how.scale * product("bkgd,bksd->bkgs", q, keys), -math.inf)
    top = jnp.max(scores, axis=3, keepdims=True, initial=-1e30)
    if sinks is not None:
        sinks = sinks.reshape(1, K, N // max(K, 1), 1)
        top = jnp.maximum(top, sinks)
    top = lax.stop_gradient(top)
    shares = jnp.exp(scores - top)
    total = jnp.sum(shares, axis=3, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    shares = shares / jnp.where(inside[:, None, None, None], total, 1)
    out = product("bkgs,bksd->bkgd", shares.astype(q.dtype), values)
    return out.reshape(B, N, H).astype(q.dtype), k_cache, v_cache
