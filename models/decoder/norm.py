"""RMS norms (Zhang and Sennrich 2019, arXiv:1910.07467), written so that XLA needs few kernels for them.

Parameters and numbers are those of `nnx.RMSNorm`, up to the order of float32 roundings. Statistics are float32. The
backward keeps only the input: recomputing the float32 intermediates costs less than storing them.

XLA for GPUs makes one kernel of a norm if only unary operations are between its reduction and the product with x (JAX
0.11.2). So epsilon and the division by the number of features are inside the sum, and the scale comes last.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


def normalized(norm: nnx.RMSNorm, x: jax.Array) -> jax.Array:
    """norm(x)."""
    assert norm.scale is not None

    def run(scale: jax.Array, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        terms = (jnp.square(wide) + norm.epsilon) * (1 / x.shape[-1])  # their sum: the mean square and epsilon
        factors = lax.rsqrt(jnp.sum(terms, axis=-1, keepdims=True))
        scale = scale.astype(norm.dtype).astype(jnp.float32).reshape(*(1,) * (x.ndim - 1), -1)
        return (wide * factors * scale).astype(norm.dtype)

    return jax.checkpoint(run, prevent_cse=False)(norm.scale[...], x)
