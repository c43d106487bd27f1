"""One side of an FP8 product, and how it is made from a `Quantized` tensor."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxops._lib.numerics.fp8 import Quantized
from jaxops._lib.planning.costs import bytes_of
from jaxops.ops.quantize import Format, dequantize

# A tensor and its transpose have the same scales: a missing layout is a transposed copy of the other one.
TRANSPOSABLE = ("tensorwise", "block_128x128")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operand:
    """An FP8 matrix whose last axis is contracted, and its scales.

    Attributes:
      values: [rows, K] float8, or a stack [G, rows, K].
      scales: float32; a stack's have a leading G.
        tensorwise: []. rowwise: [rows]. block_1x128: [cdiv(K, 128), rows]. block_128x128: [cdiv(rows, 128), cdiv(K,
          128)].
      scaling: one of the four.
      cast: values are not FP8 yet, and scales unused: the product casts rows to this format of 1x128 blocks.
    """

    values: jax.Array
    scales: jax.Array
    scaling: str = dataclasses.field(metadata={"static": True})
    cast: Format | None = dataclasses.field(default=None, metadata={"static": True})


def shape_of(x: jax.Array | Quantized) -> tuple[int, ...]:
    """[M, K] or [G, M, K] of an array or a quantized tensor."""
    if not isinstance(x, Quantized):
        return tuple(x.shape)
    if x.values is not None:
        return x.values.shape
    *stack, K, M = x.values_t.shape  # pyright: ignore[reportOptionalMemberAccess]  # one of the layouts is not None
    return *stack, M, K


def rows_of(q: Quantized) -> Operand:
    """The rows of an [M, K] tensor as the operand's rows: K is contracted."""
    return _operand(q, (q.values, q.scales), (q.values_t, q.scales_t), "row")


def cols_of(q: Quantized) -> Operand:
    """The columns of an [M, K] tensor as the operand's rows: M is contracted."""
    return _operand(q, (q.values_t, q.scales_t), (q.values, q.scales), "column")


def _operand(q: Quantized, layout: tuple, other: tuple, name: str) -> Operand:
    values, scales = layout
    if values is None:
        if q.scaling not in TRANSPOSABLE or other[0] is None:
            raise ValueError(
                f"the quantized tensor has no {name} layout, and {q.scaling} scales are not those of its transpose: "
                "quantize it with layouts='both'."
            )
        values, scales = jnp.swapaxes(other[0], -1, -2), other[1]
        scales = jnp.swapaxes(scales, -1, -2) if q.scaling == "block_128x128" else scales
    return Operand(values, scales, q.scaling)


def bytes_of_columns(a: Operand, b: Operand, columns: int) -> int:
    """Bytes of so many columns of both operands, and of their scales: a ragged contraction reads no more of the columns
    that the operands have for groups' padding."""
    return bytes_of(a.values, a.scales, b.values, b.scales) * columns // a.values.shape[1]


def unquantized(x: jax.Array) -> Operand:
    """x [rows, K] as it is, float32 as bfloat16: a product converts the other operand, whose FP8 values are exact in
    both half precisions."""
    return Operand(x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, jnp.ones((), jnp.float32), "tensorwise")


def cast_in_product(x: jax.Array, form: Format) -> Operand:
    """x [rows, K], which the product casts in blocks of 1x128."""
    return Operand(x, jnp.ones(1, jnp.float32), form.scaling, form)


def dequantize_operand(operand: Operand) -> jax.Array:
    """The matrix [rows, K], or the stack, in float32."""
    return dequantize(Quantized(operand.values, operand.scales, scaling=operand.scaling, dtype="float32"))
