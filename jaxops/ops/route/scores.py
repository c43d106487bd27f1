"""What both backends compute in the same way: keys that compare scores, and factors of losses."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.symbolic import is_symbolic

GONE = -(2**31)  # less than every key: experts that are excluded, or already chosen


def keys_of(x: jax.Array) -> jax.Array:
    """int32 in the order of float32 x; NaN ranks as -inf, -0 as 0, and no key is GONE."""
    bits = lax.bitcast_convert_type(jnp.where(x == x, x, -jnp.inf), jnp.int32)
    return jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def loss_factors(T: int, E: int, k: int, tokens: jax.Array | None) -> tuple[jax.Array | float, jax.Array | float]:
    """Factors on sums over tokens: of load times the sum of shares for aux_loss, and of squared logsumexps for z_loss.

    tokens: int32, how many of the T count; None for all. If all do, the factors have the same bits as without it.
    """
    if is_symbolic(T):
        each = _over(jnp.asarray(T, jnp.int32) if tokens is None else tokens)
        return E / k * each * each, each
    most = max(1, T)  # both losses are 0 without tokens
    aux, z = E / (most * most * k), 1 / most
    if tokens is None:
        return aux, z
    each = _over(tokens)
    return jnp.where(tokens == T, aux, E / k * each * each), jnp.where(tokens == T, z, each)


def _over(tokens: jax.Array) -> jax.Array:
    return 1 / jnp.maximum(tokens, 1).astype(jnp.float32)
