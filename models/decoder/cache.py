"""What a layer remembers of earlier tokens, for generation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.decoder.attention import KeysValues


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


def write(cache: KeysValues, new: tuple[jax.Array, jax.Array], places: Places) -> KeysValues:
    """The cache with the tokens' own arrays at their positions. Padding is not written.

    Args:
      cache: keys and values, [B, heads, length, ...], or latents, [B, length, ...].
      new: [B, T, heads, ...], or [B, T, ...].
    """
    first, second = (_write(old, part, places) for old, part in zip(cache, new, strict=True))
    return first, second


def _write(old: jax.Array, new: jax.Array, places: Places) -> jax.Array:
    rows = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
    positions = jnp.where(places.valid, places.positions, old.shape[old.ndim - 2])  # out of bounds: dropped
    where = (rows, slice(None), positions) if old.ndim == 4 else (rows, positions)
    return old.at[where].set(new.astype(old.dtype), mode="drop")
