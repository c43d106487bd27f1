"""The portable backend: XLA multiplies dequantized operands. For CPU and TPU, and the benchmarks' XLA baseline."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.ragged.offsets import padded_starts
from jaxops.ops.fp8_matmul.operand import Operand, dequantize_operand
from jaxops.ops.grouped_matmul import grouped_matmul, grouped_wgrad

HIGHEST = lax.Precision.HIGHEST


def multiply_xla(
    a: Operand, b: Operand, offsets=None, *, length: int | None = None, out_dtype, fast: bool = False
) -> jax.Array:
    """C = A @ B.T in out_dtype. No size is 0.

    - Dense: a [M, K], b [N, K] -> [M, N].
    - offsets: a [M, K], b [G, N, K] -> [M, N], each group of a's rows by its own b; rows outside the groups are zero.
    - offsets and length: a [M, Kp], b [N, Kp] -> [G, M, N], a product per group over the group's part of Kp. a and b
      are column layouts of ragged tensors with `length` rows, whose groups are padded to multiples of 128.

    Args:
      offsets: [G + 1] int32.
      fast: with tensorwise or rowwise scales, on a GPU: cuBLASLt may accumulate in about 14 bits.
    """
    if offsets is not None:
        options = {"precision": HIGHEST, "out_dtype": out_dtype, "backend": "xla"}
        if length is None:
            return grouped_matmul(dequantize_operand(a), dequantize_operand(b), offsets, transpose_rhs=True, **options)
        starts = padded_starts(offsets, length)
        return grouped_wgrad(dequantize_operand(a).T, dequantize_operand(b).T, starts, **options)
    if not {a.scaling, b.scaling} <= {"tensorwise", "rowwise"}:
        return _dot(dequantize_operand(a), dequantize_operand(b), HIGHEST).astype(out_dtype)
    # XLA's GPU rewriter makes a cuBLASLt FP8 call only of this form: converted values, a dot over both last axes,
    # scales after it; the dot's precision selects fast accumulation. Operands dequantized to bfloat16 are not
    # rewritten, and have scales rounded to bfloat16: a bfloat16 GEMM, 0.4 % off in every result (H200, JAX 0.11.2,
    # 2026-11-21).
    product = _dot(
        a.values.astype(jnp.float32), b.values.astype(jnp.float32), lax.Precision.DEFAULT if fast else HIGHEST
    )
    rowwise = "rowwise" in (a.scaling, b.scaling)
    scales = (a.scales.reshape(-1, 1), b.scales.reshape(1, -1)) if rowwise else (a.scales, b.scales)
    return (product * scales[0] * scales[1]).astype(out_dtype)


def _dot(a: jax.Array, b: jax.Array, precision: lax.Precision) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
