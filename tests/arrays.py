"""Arrays of numpy on the device, and shapes without arrays."""

import jax
import jax.numpy as jnp
import numpy as np


def put(x, dtype=None) -> jax.Array:
    """As `jnp.asarray`, for which XLA compiles a program for each shape and dtype: a seventh of all programs here."""
    return jax.device_put(np.asarray(x, None if dtype is None else jnp.dtype(dtype)))


def shape(*sizes: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def f32(*sizes: int) -> jax.ShapeDtypeStruct:
    return shape(*sizes, dtype="float32")


def i32(*sizes: int) -> jax.ShapeDtypeStruct:
    return shape(*sizes, dtype="int32")


def normal(seed: int, *shape: int, dtype="float32") -> jax.Array:
    """Normal numbers, drawn by numpy."""
    return put(np.random.default_rng(seed).normal(size=shape), dtype)


def drawn_like(shapes, rng: np.random.Generator, scale: float = 1.0):
    """Normal numbers in place of a tree's arrays or shapes, as of `nnx.eval_shape`: nothing is compiled."""
    return jax.tree.map(lambda x: put(rng.normal(scale=scale, size=x.shape), x.dtype), shapes)
