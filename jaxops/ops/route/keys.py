"""Integers that stand for numbers where the largest is looked for: the same order in every backend, with a place for NaN."""

import jax
import jax.numpy as jnp
from jax import lax

GONE = -(2**31)  # below every key: what cannot be chosen, or is already


def keys_of(x: jax.Array) -> jax.Array:
    """int32 in the order of float32 x; NaN is as -inf, -0 as 0, and no key is GONE."""
    bits = lax.bitcast_convert_type(jnp.where(x == x, x, -jnp.inf), jnp.int32)
    return jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
