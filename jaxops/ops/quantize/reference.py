"""What quantisation means, for one matrix in its row layout, in plain jnp; the column layout is that of the transpose.
For tests.
"""

import jax
import jax.numpy as jnp

from jaxops._lib.numerics.fp8 import AMAX_MAX, AMAX_MIN, BLOCK


def quantize_reference(x: jax.Array, scaling: str, dtype) -> tuple[jax.Array, jax.Array]:
    """(values [M, K], scales [1, 1], [M, 1], [M, cdiv(K, 128)] or [cdiv(M, 128), cdiv(K, 128)]) of x [M, K]; `values *
    scales of its block` is x.
    """
    M, K = x.shape
    height, width = {
        "tensorwise": (M, K),
        "rowwise": (1, K),
        "block_1x128": (1, BLOCK),
        "block_128x128": (BLOCK, BLOCK),
    }[scaling]
    i, j = jnp.arange(M)[:, None] // height, jnp.arange(K)[None, :] // width  # each element's block
    x, most = x.astype(jnp.float32), float(jnp.finfo(dtype).max)
    amax = jnp.zeros((-(-M // height), -(-K // width))).at[i, j].max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0))
    # Few mantissas, so that the quotient below is the same number wherever division is only nearly right.
    mantissa, exponent = jnp.frexp(jnp.clip(amax, AMAX_MIN, AMAX_MAX))
    amax = jnp.ldexp(jnp.ceil(mantissa * 2**8) / 2**8, exponent)
    mantissa, exponent = jnp.frexp(most / amax)
    factor = jnp.ldexp(jnp.floor(mantissa * 2**15 + 0.5) / 2**15, exponent)
    values = jnp.where(jnp.isfinite(x), jnp.clip(x * factor[i, j], -most, most), jnp.nan)
    return values.astype(dtype), amax * (1 / most)
