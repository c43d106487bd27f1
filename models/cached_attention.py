"""Attention of new tokens over the cached keys and values of their row, for generation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

KeysValues = tuple[jax.Array, jax.Array]


class Places(NamedTuple):
    """Where the tokens [B, T] of a call stand.

    Attributes:
      positions: [B, T] int32, of each token in its row.
      valid: [B, T] bool; the other tokens are padding, at each row's end.
    """

    positions: jax.Array
    valid: jax.Array

    @classmethod
    def after(cls, at: jax.Array, count: jax.Array, length: int) -> "Places":
        """`length` tokens a row, of which row b's first count[b] are valid and begin at position at[b]."""
        steps = jnp.arange(length, dtype=jnp.int32)[None, :]
        return cls(at[:, None] + steps, steps < count[:, None])


def empty(batch: int, length: int, kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike) -> KeysValues:
    """A layer's keys and values, [batch, kv_heads, length, head_dim]: products need no transposed copy of these."""
    shape = (batch, kv_heads, length, head_dim)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def write(cache: KeysValues, k: jax.Array, v: jax.Array, places: Places) -> KeysValues:
    """The cache with k and v [B, T, kv_heads, head_dim] at their positions. Padding is not written."""
    rows = jnp.arange(k.shape[0], dtype=jnp.int32)[:, None]
    positions = jnp.where(places.valid, places.positions, cache[0].shape[2])  # out of bounds: dropped
    keys, values = (
        old.at[rows, :, positions].set(new.astype(old.dtype), mode="drop")
        for old, new in zip(cache, (k, v), strict=True)
    )
    return keys, values


def attend(q: jax.Array, cache: KeysValues, places: Places) -> jax.Array:
    """Of q [B, T, heads, head_dim] over all cached tokens up to its own position, -> [B, T, heads, head_dim].

    Scores and softmax are float32. The result of padding is zero.
    """
    (keys, values), (B, T, heads, D) = cache, q.shape
    kv_heads, length = keys.shape[1:3]
    grouped = q.reshape(B, T, kv_heads, heads // kv_heads, D).transpose(0, 2, 3, 1, 4).reshape(B, kv_heads, -1, D)
    scores = jnp.einsum("bkqd,bksd->bkqs", grouped, keys, preferred_element_type=jnp.float32) * D**-0.5
    seen = jnp.arange(length, dtype=jnp.int32)[None, None, :] <= places.positions[:, :, None]
    scores = jnp.where(seen[:, None, None], scores.reshape(B, kv_heads, -1, T, length), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype).reshape(B, kv_heads, -1, length)
    mixed = jnp.einsum("bkqs,bksd->bkqd", weights, values, preferred_element_type=jnp.float32)
    mixed = mixed.reshape(B, kv_heads, -1, T, D).transpose(0, 3, 1, 2, 4).reshape(B, T, heads, D)
    return jnp.where(places.valid[:, :, None, None], mixed, 0).astype(q.dtype)
