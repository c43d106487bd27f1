"""The portable backend: operands are dequantised and multiplied by XLA. CPU, TPU, and the benchmarks' plain-XLA side."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.ragged import padded_starts
from jaxops.ops.fp8_matmul.operand import Operand, dequantize_operand
from jaxops.ops.grouped_matmul import grouped_matmul, grouped_wgrad


def _dot(a: jax.Array, b: jax.Array, precision: lax.Precision) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def multiply_xla(
    a: Operand,
    b: Operand,
    offsets: jax.Array | None = None,
    *,
    ragged: str | None = None,
    length: int | None = None,
    out_dtype,
    fast: bool = False,
) -> jax.Array:
    """C = A @ B.T in out_dtype. No size is 0.

    Args:
      a, b: see `ragged`.
      offsets: [G + 1] int32, with `ragged`.
      ragged: None: a [M, K], b [N, K] -> [M, N].
        "rows": a [M, K], b [G, N, K] -> [M, N], each group of a's rows by its own b; rows outside the groups are zero.
        "contraction": a [M, Kp], b [N, Kp], the column layouts of ragged tensors -> [G, M, N], each group of the contracted numbers by itself.
      length: "contraction" only: how many numbers are contracted, without what pads each group to whole blocks of 128.
      fast: with one scale an operand, on a GPU: cuBLASLt may sum in about 14 bits.
    """
    if ragged is None:
        if a.scaling not in ("tensorwise", "rowwise"):
            return _dot(dequantize_operand(a), dequantize_operand(b), lax.Precision.HIGHEST).astype(out_dtype)
        # Converted straight into a dot over both last dimensions: XLA's rewriter for NVIDIA GPUs makes that a cuBLASLt call in FP8 for any scales, whose
        # precision says whether its sums are fast. The result is float32, rounded in the pass that scales it: operands dequantised to bfloat16 are not
        # rewritten, and take a scale rounded to bfloat16 (H200, jax 0.11.2, 2026-11-21: a bfloat16 GEMM, all of whose results are 0.4 % off).
        product = _dot(
            a.values.astype(jnp.float32),
            b.values.astype(jnp.float32),
            lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST,
        )
        scaled = (
            product * a.scales.reshape(-1, 1) * b.scales.reshape(1, -1)
            if a.scaling == "rowwise"
            else product * a.scales * b.scales
        )
        return scaled.astype(out_dtype)
    assert offsets is not None
    how = {"precision": lax.Precision.HIGHEST, "out_dtype": out_dtype, "backend": "xla"}
    if ragged == "rows":
        return grouped_matmul(dequantize_operand(a), dequantize_operand(b), offsets, transpose_rhs=True, **how)
    assert length is not None
    starts = padded_starts(offsets, length)
    return grouped_wgrad(dequantize_operand(a).T, dequantize_operand(b).T, starts, **how)
