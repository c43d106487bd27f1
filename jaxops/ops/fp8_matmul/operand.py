"""One side of a product, and how it is made of a quantised tensor."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxops._lib.fp8 import BLOCK, Quantized

TRANSPOSABLE = (
    "tensorwise",
    "block_128x128",
)  # their scales are those of the transpose: a layout that is not there can be made of the other


class Operand(NamedTuple):
    """FP8 numbers with the contracted dimension last, and their scales.

    Attributes:
      values: [rows, K] float8, or a stack [G, rows, K].
      scales: float32; a stack's have a leading G.
        tensorwise: []. rowwise: [rows]. block_1x128: [cdiv(K, 128), rows]. block_128x128: [cdiv(rows, 128), cdiv(K, 128)].
      scaling: which of the four.
    """

    values: jax.Array
    scales: jax.Array
    scaling: str


def shape_of(x: jax.Array | Quantized) -> tuple[int, ...]:
    """[M, K] or [G, M, K] of an array or a quantised tensor."""
    if not isinstance(x, Quantized):
        return x.shape
    if x.values is not None:
        return x.values.shape
    *stack, K, M = x.values_t.shape  # pyright: ignore[reportOptionalMemberAccess]  # one of the layouts is there
    return *stack, M, K


def _operand(values, scales, other, other_scales, scaling: str, missing: str) -> Operand:
    if values is None:
        if scaling not in TRANSPOSABLE or other is None:
            raise ValueError(
                f"the quantised tensor has no {missing} layout, and {scaling} scales are not those of its transpose: quantise it with layouts='both'."
            )
        values = jnp.swapaxes(other, -1, -2)
        scales = jnp.swapaxes(other_scales, -1, -2) if scaling == "block_128x128" else other_scales
    return Operand(values, scales, scaling)


def rows_of(q: Quantized) -> Operand:
    """Of an [M, K] tensor the operand whose rows are its rows: to be multiplied over K."""
    return _operand(q.values, q.scales, q.values_t, q.scales_t, q.scaling, "row")


def cols_of(q: Quantized) -> Operand:
    """Of an [M, K] tensor the operand whose rows are its columns: to be multiplied over M."""
    return _operand(q.values_t, q.scales_t, q.values, q.scales, q.scaling, "column")


def dequantize_operand(operand: Operand) -> jax.Array:
    """The tensor, [rows, K] or a stack of it, in float32."""
    values, scales, scaling = operand
    if scaling in ("tensorwise", "rowwise"):
        scales = scales.reshape(scales.shape + (1,) * (values.ndim - scales.ndim))
    else:
        *_, rows, K = values.shape
        scales = (
            jnp.swapaxes(scales, -1, -2)
            if scaling == "block_1x128"
            else jnp.repeat(scales, BLOCK, axis=-2)[..., :rows, :]
        )
        scales = jnp.repeat(scales, BLOCK, axis=-1)[..., :K]
    return values.astype(jnp.float32) * scales
