"""int32 keys for comparing scores: the same order in every backend, with a rank for NaN."""

import jax
import jax.numpy as jnp
from jax import lax

GONE = -(2**31)  # less than every key: experts that are excluded, or already chosen


def keys_of(x: jax.Array) -> jax.Array:
    """int32 in the order of float32 x; NaN ranks as -inf, -0 as 0, and no key is GONE."""
    bits = lax.bitcast_convert_type(jnp.where(x == x, x, -jnp.inf), jnp.int32)
    return jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
