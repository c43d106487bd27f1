"""FP8 number formats: the pytree of a quantised tensor, how a scale is found, and the casts. Every device and backend gets the same bits."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.checks import check_array, float_dtype

BLOCK = 128  # elements that share a scale in the 1x128 and 128x128 recipes (DeepSeek-V3, arXiv:2412.19437)
FP8 = ("float8_e4m3fn", "float8_e5m2")
SCALINGS = ("tensorwise", "rowwise", "block_1x128", "block_128x128")
LEAST = 2.0**-92  # counts as the largest magnitude of what holds nothing larger: finite scales and factors, exact zeros
MOST = 2.0**128 - 2.0**120  # a larger one counts as this, the largest bfloat16
_FACTOR_BITS = 15  # of a factor's mantissa


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A tensor [M, K] in FP8: `values * scales` gives it back, or `values_t * scales_t` its transpose. A stack of G tensors has a leading G everywhere.

    The two layouts are quantised each by itself from the tensor; FP8 products read the one whose contraction axis comes last.

    Attributes:
      values: [M, K] float8, the row layout; None where only the other one was asked.
      scales: float32; tensorwise [], rowwise [M], block_1x128 [cdiv(K, 128), M] (the block's number first), block_128x128 [cdiv(M, 128), cdiv(K, 128)].
      values_t: [K, M] float8, the column layout, or None.
      scales_t: as scales, with M and K exchanged.
      scaling: what shares a scale, one of `SCALINGS`; of values_t it is said along its own rows, the tensor's columns.
      dtype: name of the tensor's dtype before, which `dequantize` gives back.
      group_offsets: [G + 1] int32 where the tensor's rows were quantised as ragged groups. The columns of values_t are then padded: each group starts at
        a multiple of 128 (`jaxops._lib.ragged.padded_starts`), zeros fill up its last 128, and what stands behind the last group is unspecified.
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
        """The transposed tensor: the two layouts change places. With block_128x128 and tensorwise scales it equals the transpose's own quantisation."""
        if self.group_offsets is not None:
            raise NotImplementedError(
                "a tensor of ragged groups has no transpose: the columns of its values_t are padded."
            )
        return dataclasses.replace(
            self, values=self.values_t, scales=self.scales_t, values_t=self.values, scales_t=self.scales
        )

    @classmethod
    def from_deepseek(cls, weight: jax.Array, weight_scale_inv: jax.Array, dtype: str = "bfloat16") -> "Quantized":
        """The matrix w [K, N] of a linear layer y = x @ w, from a checkpoint in DeepSeek-V3's layout, without a copy.

        Args:
          weight: [N, K] float8_e4m3fn, or a stack [G, N, K].
          weight_scale_inv: [cdiv(N, 128), cdiv(K, 128)] float32 (a stack: [G, ...]), what a block is multiplied by.
          dtype: of w, once dequantised: bfloat16, float16 or float32.

        Raises:
          ValueError: scales of another shape.
          TypeError: other dtypes.
        """
        check_array("weight", weight, "a float8 array [N, K] or [G, N, K]")
        check_array("weight_scale_inv", weight_scale_inv, "a float32 array, a scale for each 128 x 128")
        *stack, N, K = weight.shape
        needed = (*stack, -(-N // BLOCK), -(-K // BLOCK))
        if jnp.dtype(weight.dtype).name not in FP8:
            raise TypeError(
                f"weight is {weight.dtype}; it must be one of {', '.join(FP8)}. Quantise other weights with jaxops.quantize."
            )
        if weight_scale_inv.shape != needed:
            raise ValueError(
                f"weight_scale_inv has shape {weight_scale_inv.shape}; a weight {weight.shape} needs {needed}, a scale for each 128 x 128."
            )
        if weight_scale_inv.dtype != jnp.float32:
            raise TypeError(
                f"weight_scale_inv is {weight_scale_inv.dtype}; write weight_scale_inv.astype(jnp.float32)."
            )
        return cls(
            None, None, weight, weight_scale_inv, scaling="block_128x128", dtype=float_dtype("dtype", dtype).name
        )


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def infinity_to_nan(x: jax.Array) -> jax.Array:
    """x in float32, with NaN for infinities: the cast would make the largest FP8 number of them, and a product finite.

    Call it before the multiplication by a factor: a finite number that overflows there, under a small given amax, must
    saturate. Infinity times zero is NaN, so this is a multiply-add, in x's own dtype: a comparison and a select in float32
    made casts to both layouts up to 11 % slower on an H200 (2026-11-23), this up to 7 %.
    """
    return (x * 0.0 + x).astype(jnp.float32)


def magnitudes(x: jax.Array) -> jax.Array:
    """|x| in float32, zero for NaN and infinities: what the largest magnitude is taken of."""
    size = jnp.abs(x.astype(jnp.float32))
    return jnp.where(size < jnp.inf, size, 0.0)


def without_nan(amax: jax.Array) -> jax.Array:
    return jnp.where(amax == amax, amax, 0.0)


def scale_and_factor(amax: jax.Array, dtype, pow2: bool = False) -> tuple[jax.Array, jax.Array]:
    """(factor that gives values back, factor to multiply by before the cast) of what has the largest magnitude amax, float32 of any shape.

    The same bits from every compiler, though division is approximate on a GPU. amax is rounded up to bfloat16 first (which changes no bfloat16 tensor's),
    so only 128 mantissas occur; the scale is one correctly rounded product. The quotient is rounded to _FACTOR_BITS bits, and for none of the 128
    does it lie within 8 ulp of where that rounding turns. With pow2 both are powers of two, the scale the least one with which amax does not saturate.
    """
    most = float(jnp.finfo(dtype).max)  # 1.75 times a power of two, in both formats
    exponent = most.as_integer_ratio()[0].bit_length() - 1
    m = jnp.minimum(jnp.maximum(without_nan(amax), LEAST), MOST)
    bits = (_bits(m) + 0xFFFF) & ~0xFFFF
    biased, mantissa = bits >> 23, bits & 0x7FFFFF
    if pow2:
        biased = biased - exponent + (mantissa > 0x600000).astype(jnp.int32)
        return _float(biased << 23), _float((254 - biased) << 23)
    drop = 24 - _FACTOR_BITS
    quotient = _bits(
        most / _float(mantissa | 0x3F800000)
    )  # of a number in [1, 2), far from where a fast division gives up
    quotient = (quotient + (1 << (drop - 1))) & ~((1 << drop) - 1)
    return _float(bits) * (1 / most), _float(quotient - ((biased - 127) << 23))


def cast_saturating(values: jax.Array, dtype, saturates: bool = False) -> jax.Array:
    """Rounds float32 to FP8; what is too large, an infinity too, becomes the largest number, NaN stays NaN.

    XLA on the CPU makes NaN of both, hence the clip. With `saturates` the cast does that itself, as the instruction that
    Triton makes of it (cvt.rn.satfinite) does.
    """
    if saturates:
        return values.astype(dtype)
    most = float(jnp.finfo(dtype).max)
    return jnp.where(values == values, jnp.minimum(jnp.maximum(values, -most), most), values).astype(dtype)


def cast_stochastic(values: jax.Array, dtype, random: jax.Array) -> jax.Array:
    """As `cast_saturating`, but up or down in proportion to how near the two neighbours are, by the high bits of `random` (int32, from `random_bits`)."""
    info = jnp.finfo(dtype)
    most, least, drop = float(info.max), float(info.smallest_normal), 23 - int(info.nmant)
    size = jnp.minimum(jnp.abs(values), most)
    # Below the least normal number the steps stay as long as its own. Added to it, a number has just these steps where its mantissa is cut.
    # (That sum rounds away float32 subnormals, so it does not matter who flushes them; and through |.| no compiler fuses the product before into it.)
    raised = jnp.where(size < least, least, 0.0)
    bits = _bits(size + raised) + lax.shift_right_logical(random, jnp.full_like(random, 32 - drop))
    rounded = _float(bits & -(1 << drop)) - raised
    signed = _float(_bits(rounded) | (_bits(values) & -0x80000000))
    return jnp.where(values == values, signed, values).astype(dtype)


def _mix(h: jax.Array, *rounds: tuple[int, int]) -> jax.Array:
    for shift, factor in rounds:
        h = (h ^ lax.shift_right_logical(h, jnp.full_like(h, shift))) * factor
    return h


_MIX = (
    (16, 0x7FEB352D),
    (15, 0x846CA68B - (1 << 32)),
)  # of the "lowbias32" integer hash (C. Wellons, nullprogram.com/blog/2018/07/31)


def random_bits(row: jax.Array, column: jax.Array, words: tuple[jax.Array, jax.Array]) -> jax.Array:
    """32 bits (int32), the high ones random, for each element, from its place in the tensor and two key words alone: the same in both layouts and every kernel.

    A row's and a column's hash are found once for all their elements; an element's own costs two products.

    Args:
      row, column: int32, broadcastable against each other; a stack's row is counted from the stack's first.
      words: int32 scalars.
    """
    row_hash = _mix(row * (0x9E3779B1 - (1 << 32)) ^ words[0], *_MIX)
    column_hash = _mix(column * (0x85EBCA77 - (1 << 32)) ^ words[1], *_MIX)
    return _mix((row_hash | 1) * (column_hash | 1), _MIX[1])


def quantize_blocks(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """(values [T, D], scales [T, D / 128]) of float32 x[T, D], D a multiple of 128: one scale for 128 columns of a row."""
    blocks = x.reshape(x.shape[0], -1, BLOCK)
    scale, factor = scale_and_factor(jnp.max(magnitudes(blocks), axis=-1, keepdims=True), dtype)
    return cast_saturating(infinity_to_nan(blocks) * factor, dtype).reshape(x.shape), scale.reshape(x.shape[0], -1)
