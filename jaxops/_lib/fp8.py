"""FP8 number formats: how a block's scale is found, and the saturating cast."""

import dataclasses

import jax
import jax.numpy as jnp

BLOCK = 128  # columns that share a scale in the 1x128 recipe (DeepSeek-V3, arXiv:2412.19437)
FP8 = ("float8_e4m3fn", "float8_e5m2")
_LEAST = 1e-30  # an all-zero block gets this for its largest value: finite scales, exact zeros
_MOST = 3e38  # an infinity counts as this


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """FP8 values and the factors that give them back: `values[t, d] * scales[t, d // 128]`.

    Attributes:
      values: [T, D], float8.
      scales: [T, cdiv(D, 128)] float32.
    """

    values: jax.Array
    scales: jax.Array


def block_scale(blocks: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """(factor that gives the values back, factor to multiply by before the cast) of blocks [..., n]: float32 [..., 1]. NaN is left out."""
    most = float(jnp.finfo(dtype).max)
    size = jnp.minimum(jnp.abs(blocks), _MOST)
    amax = jnp.maximum(jnp.max(jnp.where(blocks == blocks, size, 0.0), axis=-1, keepdims=True), _LEAST)
    return amax * (1 / most), most / amax


def cast_saturating(values: jax.Array, dtype) -> jax.Array:
    """Rounds float32 to FP8; what is too large becomes the largest number, NaN stays NaN. XLA on the CPU makes NaN of both, hence the clip."""
    most = float(jnp.finfo(dtype).max)
    return jnp.where(values == values, jnp.minimum(jnp.maximum(values, -most), most), values).astype(dtype)


def quantize_blocks(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """(values [T, D], scales [T, D / 128]) of float32 x[T, D], D a multiple of 128: one scale for 128 columns of a row."""
    blocks = x.reshape(x.shape[0], -1, BLOCK)
    scale, factor = block_scale(blocks, dtype)
    return cast_saturating(blocks * factor, dtype).reshape(x.shape), scale.reshape(x.shape[0], -1)
