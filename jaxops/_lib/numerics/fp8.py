"""FP8: the pytree of a quantised tensor, scales and casts, with the same bits on every device and backend."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.checks import check_array, float_dtype
from jaxops._lib.arrays.pytrees import register
from jaxops._lib.numerics import instructions

BLOCK = 128  # elements that share a scale in the 1x128 and 128x128 recipes (DeepSeek-V3, arXiv:2412.19437)
FP8 = ("float8_e4m3fn", "float8_e5m2")
SCALINGS = ("tensorwise", "rowwise", "block_1x128", "block_128x128")
AMAX_MIN = 2.0**-92  # smaller largest magnitudes count as this one: scales and factors are finite, zeros stay exact
AMAX_MAX = 2.0**128 - 2.0**120  # larger ones count as this one, the largest bfloat16
_FACTOR_BITS = 15  # of a factor's mantissa


@register
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A tensor [M, K] in FP8: `values * scales`, or transposed `values_t * scales_t`. A stack has a leading G in all.

    Each layout is quantised by itself; FP8 products read the one whose contracted axis is last.

    Attributes:
      values: [M, K] float8, the row layout, or None.
      scales: float32; tensorwise [], rowwise [M], block_1x128 [cdiv(K, 128), M],
        block_128x128 [cdiv(M, 128), cdiv(K, 128)].
      values_t: [K, M] float8, the column layout, or None.
      scales_t: as scales, with M and K exchanged.
      scaling: which elements share a scale, one of `SCALINGS`; for values_t, of the transpose.
      dtype: name of the tensor's dtype before quantisation, the default of `dequantize`.
      group_offsets: [G + 1] int32 if the rows are ragged groups, else None. Then each group's columns of values_t start
        at a multiple of 128 and are zero-filled to the next one; columns behind the last group are unspecified.
    """

    values: jax.Array | None
    scales: jax.Array | None
    values_t: jax.Array | None = None
    scales_t: jax.Array | None = None
    scaling: str = dataclasses.field(default="block_1x128", metadata={"static": True})
    dtype: str = dataclasses.field(default="bfloat16", metadata={"static": True})
    group_offsets: jax.Array | None = None

    @property
    def T(self) -> "Quantized":
        """The transpose, with the layouts swapped; as quantised itself with block_128x128 or tensorwise scales."""
        if self.group_offsets is not None:
            raise NotImplementedError(
                "a tensor of ragged groups has no transpose: the columns of its values_t are padded."
            )
        swapped = {"values": self.values_t, "scales": self.scales_t, "values_t": self.values, "scales_t": self.scales}
        return dataclasses.replace(self, **swapped)

    @classmethod
    def from_deepseek(cls, weight: jax.Array, weight_scale_inv: jax.Array, dtype: str = "bfloat16") -> "Quantized":
        """The matrix w [K, N] of a linear layer y = x @ w, from a checkpoint in DeepSeek-V3's layout, without a copy.

        Args:
          weight: [N, K] float8, or a stack [G, N, K].
          weight_scale_inv: [cdiv(N, 128), cdiv(K, 128)] float32 (a stack: [G, ...]), the factor of each block.
          dtype: of w once dequantised: bfloat16, float16 or float32.

        Raises:
          ValueError: scales of another shape.
          TypeError: other dtypes.
        """
        check_array("weight", weight, "a float8 array [N, K] or [G, N, K]")
        check_array("weight_scale_inv", weight_scale_inv, "a float32 array, a scale for each 128 x 128")
        *stack, N, K = weight.shape
        needed, known = (*stack, -(-N // BLOCK), -(-K // BLOCK)), ", ".join(FP8)
        if jnp.dtype(weight.dtype).name not in FP8:
            hint = "Quantise other weights with jaxops.quantize."
            raise TypeError(f"weight is {weight.dtype}; it must be one of {known}. {hint}")
        if weight_scale_inv.shape != needed:
            got = f"weight_scale_inv has shape {weight_scale_inv.shape}"
            raise ValueError(f"{got}; a weight {weight.shape} needs {needed}, a scale for each 128 x 128.")
        if weight_scale_inv.dtype != jnp.float32:
            got = f"weight_scale_inv is {weight_scale_inv.dtype}"
            raise TypeError(f"{got}; write weight_scale_inv.astype(jnp.float32).")
        name = float_dtype("dtype", dtype).name
        return cls(None, None, weight, weight_scale_inv, scaling="block_128x128", dtype=name)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def infinity_to_nan(x: jax.Array, in_pairs: bool = True) -> jax.Array:
    """x in float32, with NaN for infinities, which the cast would saturate to a finite number.

    Call it before multiplying by a factor: a finite number that overflows there (amax given and small) must saturate.
    By `instructions.infinity_to_nan`, a multiply-add in x's dtype: casts to both layouts became up to 7 % slower. With
    a comparison and a select in float32 it was up to 11 %. Casting only tiles that have an infinity again, behind a
    branch on their largest magnitude, made those casts 2.2 to 2.8 times slower (H200, 2026-11-23).

    Args:
      in_pairs: as there.
    """
    return instructions.infinity_to_nan(x, in_pairs)


def magnitudes(x: jax.Array) -> jax.Array:
    """|x| in float32, zero for NaN and infinities."""
    size = jnp.abs(x.astype(jnp.float32))
    return jnp.where(size < jnp.inf, size, 0.0)


def nan_to_zero(amax: jax.Array) -> jax.Array:
    return jnp.where(amax == amax, amax, 0.0)


def scale_and_factor(
    amax: jax.Array, dtype, pow2: bool = False, is_bfloat16: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(scale, factor) of a tensor with largest magnitude amax (float32): cast x * factor; values * scale is x again.

    Every compiler gives the same bits, though a GPU's square root is approximate. amax is rounded up to bfloat16 first,
    which leaves 128 mantissas; the scale is one correctly rounded product; the factor is the scale's reciprocal,
    rounded to _FACTOR_BITS bits, and for each of the 128 it is at least 8 ulp away from a rounding boundary. With pow2
    both are powers of two, and the scale is the least one with which amax does not saturate.

    Args:
      is_bfloat16: amax is the largest magnitude of a bfloat16 tensor, finite or NaN. Then it needs no rounding.
    """
    most = float(jnp.finfo(dtype).max)  # 1.75 times a power of two, in both formats
    m = jnp.where(amax >= AMAX_MIN, amax, AMAX_MIN)  # NaN becomes AMAX_MIN, too
    if not is_bfloat16:
        m = _float((_bits(jnp.minimum(m, AMAX_MAX)) + 0xFFFF) & ~0xFFFF)
    if pow2:
        exponent, bits = most.as_integer_ratio()[0].bit_length() - 1, _bits(m)
        biased = (bits >> 23) - exponent + ((bits & 0x7FFFFF) > 0x600000).astype(jnp.int32)
        return _float(biased << 23), _float((254 - biased) << 23)
    scale = m * (1 / most)
    # Few instructions, which bound the cast to both layouts: a division has about ten. The square of the root is at
    # most 7.4 ulp off, by the bound that NVIDIA gives for the root's error.
    root, drop = instructions.rsqrt(scale), 24 - _FACTOR_BITS
    return scale, _float((_bits(root * root) + (1 << (drop - 1))) & ~((1 << drop) - 1))


def cast_saturating(values: jax.Array, dtype, saturates: bool = False) -> jax.Array:
    """float32 rounded to FP8; numbers too large, infinities included, become the largest FP8 number; NaN stays NaN.

    saturates: the cast instruction clips (Triton's cvt.rn.satfinite); XLA's on the CPU gives NaN without the clip here.
    """
    if saturates:
        return values.astype(dtype)
    most = float(jnp.finfo(dtype).max)
    return jnp.where(values == values, jnp.minimum(jnp.maximum(values, -most), most), values).astype(dtype)


def kept(values: jax.Array) -> jax.Array:
    """FP8 values for an XLA program. XLA for GPUs leaves out a cast to FP8 whose only use is a cast back to float32
    (`xla_allow_excess_precision`), so that nothing is rounded; a barrier between the two keeps both."""
    return lax.optimization_barrier(values)


def cast_stochastic(values: jax.Array, dtype, random: jax.Array) -> jax.Array:
    """As `cast_saturating`, with stochastic rounding by the high bits of `random` (int32)."""
    info = jnp.finfo(dtype)
    most, least, drop = float(info.max), float(info.smallest_normal), 23 - int(info.nmant)
    size = jnp.minimum(jnp.abs(values), most)
    # Subnormals have the spacing of the least normal number: with it added, cutting the mantissa rounds to that
    # spacing. (The sum drops float32 subnormals, flushed or not; |.| keeps compilers from fusing the product before
    # into it.)
    raised = jnp.where(size < least, least, 0.0)
    bits = _bits(size + raised) + lax.shift_right_logical(random, jnp.full_like(random, 32 - drop))
    rounded = _float(bits & -(1 << drop)) - raised
    signed = _float(_bits(rounded) | (_bits(values) & -0x80000000))
    return jnp.where(values == values, signed, values).astype(dtype)


def _mix(h: jax.Array, *rounds: tuple[int, int]) -> jax.Array:
    for shift, factor in rounds:
        h = (h ^ lax.shift_right_logical(h, jnp.full_like(h, shift))) * factor
    return h


# (shift, factor) of the "lowbias32" integer hash (C. Wellons, nullprogram.com/blog/2018/07/31).
_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))


def random_bits(row: jax.Array, column: jax.Array, words: tuple[jax.Array, jax.Array]) -> jax.Array:
    """int32, random in the high bits: a hash of the element's place and the key, so that layouts and kernels agree.

    Rows and columns are hashed once each; then an element costs two products.

    Args:
      row, column: int32, broadcastable; rows of a stack are counted from the first tensor's.
      words: the key, two int32 scalars.
    """
    row_hash = _mix(row * (0x9E3779B1 - (1 << 32)) ^ words[0], *_MIX)
    column_hash = _mix(column * (0x85EBCA77 - (1 << 32)) ^ words[1], *_MIX)
    return _mix((row_hash | 1) * (column_hash | 1), _MIX[1])


def quantize_blocks(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """(values [T, D], scales [T, D / 128]) of float32 x[T, D] with 1x128 blocks; D is a multiple of 128."""
    blocks = x.reshape(x.shape[0], -1, BLOCK)
    scale, factor = scale_and_factor(jnp.max(magnitudes(blocks), axis=-1, keepdims=True), dtype)
    return cast_saturating(infinity_to_nan(blocks) * factor, dtype).reshape(x.shape), scale.reshape(x.shape[0], -1)
