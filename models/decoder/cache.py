"""What a layer remembers of earlier tokens, for generation."""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from models.decoder.attention import KeysValues

Caches = TypeVar("Caches")


class Places(NamedTuple):
    """Where the tokens [B, T] of a call stand."""

    positions: jax.Array  # [B, T] int32, of each token in its row
    valid: jax.Array  # [B, T] bool; the other tokens are padding, at each row's end

    @classmethod
    def after(cls, at: jax.Array, count: jax.Array, length: int) -> "Places":
        """`length` tokens a row, of which row b's first count[b] are valid and begin at position at[b]."""
        steps = jnp.arange(length, dtype=jnp.int32)[None, :]
        return cls(at[:, None] + steps, steps < count[:, None])


def write(cache: KeysValues, new: KeysValues, places: Places) -> KeysValues:
    """The cache with the tokens' own arrays, [B, T, heads, ...], at their positions. Padding is not written.

    The cache has keys and values, [B, heads, length, ...], or of latent attention one array: both without the heads.
    """
    return tuple(_write(old, part, places) for old, part in zip(cache, new, strict=True))


def _write(old: jax.Array, new: jax.Array, places: Places) -> jax.Array:
    axis = old.ndim - 2  # of tokens
    if new.shape[:2] == (1, 1):  # XLA makes fewer kernels of a slice's update than of a scatter
        new = jnp.swapaxes(new, 1, axis).astype(old.dtype)
        start: list[Any] = [0] * old.ndim
        start[axis] = places.positions[0, 0]
        kept = jax.lax.dynamic_slice(old, start, new.shape)
        return jax.lax.dynamic_update_slice(old, jnp.where(places.valid[0, 0], new, kept), start)
    rows = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
    positions = jnp.where(places.valid, places.positions, old.shape[axis])  # out of bounds: dropped
    where = (rows, slice(None), positions) if old.ndim == 4 else (rows, positions)
    return old.at[where].set(new.astype(old.dtype), mode="drop")


def resized(cache: Caches, length: int) -> Caches:
    """The caches of all layers with room for `length` tokens a row, later ones cut off. Frees the given ones.

    Layer by layer, so that a second copy of one layer's at the most is alive.
    """

    def new(old: jax.Array) -> jax.Array:
        made = jax.block_until_ready(_resized(old, length))
        old.delete()
        return made

    return jax.tree.map(new, cache)


@functools.partial(jax.jit, static_argnums=1)
def _resized(old: jax.Array, length: int) -> jax.Array:
    more = max(0, length - old.shape[-2])
    kept = jax.lax.slice_in_dim(old, 0, min(length, old.shape[-2]), axis=-2)
    return jnp.pad(kept, [(0, 0)] * (old.ndim - 2) + [(0, more), (0, 0)])
