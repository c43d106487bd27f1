"""One side of an FP8 product, and how it is made from a `Quantized` tensor."""

import dataclasses
from typing import Literal

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
      scales: as those of a `Quantized` for its `values`; a stack's have a leading G.
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


def operand_of(q: Quantized, layout: Literal["row", "col"]) -> Operand:
    """The rows of a tensor [M, K] as the operand's rows, K being contracted; or with "col" its columns."""
    layouts: dict[str, tuple] = {"row": (q.values, q.scales), "col": (q.values_t, q.scales_t)}
    (values, scales), other = layouts[layout], layouts["col" if layout == "row" else "row"]
    if values is None:
        if q.scaling not in TRANSPOSABLE or other[0] is None:
            name = {"row": "row", "col": "column"}[layout]
            raise ValueError(
                f"the quantized tensor has no {name} layout, and {q.scaling} scales are not those of its transpose: "
                "quantize it with layouts='both'."
            )
        values, scales = jnp.swapaxes(other[0], -1, -2), other[1]
        scales = jnp.swapaxes(scales, -1, -2) if q.scaling == "block_128x128" else scales
    return Operand(values, scales, q.scaling)


def unquantized(x: jax.Array) -> Operand:
    """x [rows, K] as it is, float32 as bfloat16: a product converts the other operand, whose FP8 values are exact in
    both half precisions."""
    return Operand(x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, jnp.ones((), jnp.float32), "tensorwise")


def bytes_of_columns(a: Operand, b: Operand, columns: int) -> int:
    """Bytes of so many columns of both operands, and of their scales: a ragged contraction reads no more of the columns
    that the operands have for groups' padding."""
    return bytes_of(a.values, a.scales, b.values, b.scales) * columns // a.values.shape[1]


def dequantize_operand(operand: Operand) -> jax.Array:
    """The matrix [rows, K], or the stack, in float32."""
    return dequantize(Quantized(operand.values, operand.scales, scaling=operand.scaling, dtype="float32"))
