"""What every backend computes in the same way: keys that compare scores, scores for quotients, factors of losses."""

import jax
import jax.numpy as jnp
from jax import lax

GONE = -(2**31)  # less than every key: experts that are excluded, or already chosen
# Scores up to this are exp(logits) times a number of the token, up to 1e-9 of them. Sums of larger scores do not notice
# TINY.
_SMALL = 1e-9


def keys_of(x: jax.Array) -> jax.Array:
    """int32 in the order of float32 x; NaN ranks as -inf, -0 as 0, and no key is GONE."""
    bits = lax.bitcast_convert_type(jnp.where(x == x, x, -jnp.inf), jnp.int32)
    return jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def summable(scores: jax.Array, logits: jax.Array, top: jax.Array, top_score: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores [T, n] in the range of float32, for quotients of a token's scores.

    Args:
      scores: softmax or sigmoid of logits [T, n].
      top, top_score: [T, 1], the largest logit and its score.

    Returns:
      The scores; where the largest one is small, exp(logits - top), which is the scores times a number of the token.
      And for which tokens, [T, 1] bool.
    """
    small = (top_score < _SMALL) & (top > -jnp.inf)
    return jnp.where(small, jnp.exp(logits - top), scores), small


def loss_factors(T: int, E: int, k: int, tokens: jax.Array | None) -> tuple[jax.Array | float, jax.Array | float]:
    """Factors on sums over tokens: of load times the sum of shares for aux_loss, and of squared logsumexps for z_loss.

    tokens: int32, how many of the T count; None for all. If all do, the factors have the same bits as without it.
    """
    most = max(1, T)  # both losses are 0 without tokens
    aux, z = E / (most * most * k), 1 / most
    if tokens is None:
        return aux, z
    each = 1 / jnp.maximum(tokens, 1).astype(jnp.float32)
    return jnp.where(tokens == T, aux, E / k * each * each), jnp.where(tokens == T, z, each)
