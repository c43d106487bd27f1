"""What every backend computes in the same way: keys that compare scores, scores over their sum, factors of losses.

Sums and quotients of scores are those of their logarithms less the largest one: right for all finite logits, also where
float32 has no such small scores.
"""

import jax
import jax.numpy as jnp
from jax import lax

GONE = -(2**31)  # less than every key: experts that are excluded, or already chosen


def keys_of(x: jax.Array) -> jax.Array:
    """int32 in the order of float32 x; NaN ranks as -inf, -0 as 0, and no key is GONE."""
    bits = lax.bitcast_convert_type(jnp.where(x == x, x, -jnp.inf), jnp.int32)
    return jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def log_scores(score: str, logits: jax.Array, logsumexp: jax.Array) -> jax.Array:
    """The logarithms of the scores of some logits [T, n], of tokens whose logsumexp [T, 1] is over all experts."""
    if score == "softmax":
        return logits - logsumexp
    # Not abs(logits): minima have the right derivative at 0.
    return jnp.minimum(logits, 0) - jnp.log(1 + jnp.exp(jnp.minimum(logits, -logits)))


def shares_and_logsumexp(logs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """exp(logs) over their sum along axis 1, zeros where all are 0; and the logarithm of the sum, [T, 1]."""
    top = lax.stop_gradient(jnp.maximum(jnp.max(logs, axis=1, keepdims=True), jnp.finfo(jnp.float32).min))
    values = jnp.exp(logs - top)
    total = jnp.sum(values, axis=1, keepdims=True)
    return values / jnp.where(total == 0, 1, total), top + jnp.log(total)


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
