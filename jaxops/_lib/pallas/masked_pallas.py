"""Masked loads and stores of a kernel's refs. A mask of None always holds; masks, indices and values broadcast."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plgpu


def both(*masks: jax.Array | None) -> jax.Array | None:
    """Where all masks hold."""
    found = [mask for mask in masks if mask is not None]
    if not found:
        return None
    shape = np.broadcast_shapes(*(mask.shape for mask in found))
    result = jnp.broadcast_to(found[0], shape)
    for mask in found[1:]:
        result = result & jnp.broadcast_to(mask, shape)
    return result


def load(
    ref, index: tuple[jax.Array, ...], mask: jax.Array | None = None, other: int | float | jax.Array = 0.0
) -> jax.Array:
    """ref[index], `other` where the mask does not hold."""
    if mask is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=jnp.broadcast_to(mask, _shape(index)), other=other)


def store(ref, index: tuple[jax.Array, ...], value: jax.Array, mask: jax.Array | None = None) -> None:
    """ref[index] = value, cast to ref's dtype, where the mask holds."""
    shape = _shape(index)
    value = jnp.broadcast_to(value, shape).astype(ref.dtype)
    plgpu.store(ref.at[index], value, mask=None if mask is None else jnp.broadcast_to(mask, shape))


def _shape(index: tuple[jax.Array, ...]) -> tuple[int, ...]:
    return np.broadcast_shapes(*(i.shape for i in index))
