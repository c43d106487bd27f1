"""Grouped matmul on Hopper: the epilogue and the operands of its three passes."""

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.gluon.ragged_gemm_triton import Result, gemm_of, ragged_gemm
from jaxops.ops.grouped_matmul.modalities import Shapes, shapes_of
from jaxops.ops.grouped_matmul.plan import Tiles


@gluon.jit
def grouped_gemm(acc, operands, tile, VARIANT: gl.constexpr):
    """The product, plus the group's bias, if there is one."""
    if len(operands) > 0:
        acc = acc + operands[0].to(gl.float32)
    return (acc,)


def fwd_triton(
    lhs: jax.Array | tuple[jax.Array, ...], rhs: tuple[jax.Array, ...], bias: jax.Array | None, offsets: jax.Array, *,
    parts: None, out: jax.ShapeDtypeStruct, transpose_rhs: bool, tiles: Tiles, cores: int,
) -> jax.Array:  # fmt: skip
    """As `fwd_pallas`, without parts; bfloat16 or float16, all widths multiples of 8. lhs may be a pair of arrays, and
    rhs a pair of equal shapes: the two products are added before rounding."""
    lhs = lhs if isinstance(lhs, tuple) else (lhs,)
    (M, N), ((G, K, _), *_) = out.shape, shapes_of(rhs, transpose_rhs)
    gemm = gemm_of(
        f"grouped_matmul_{'dgrad' if transpose_rhs else 'fwd'}", grouped_gemm, tiles, transposed=transpose_rhs,
        operands="one" if len(lhs) == 1 else "sum", flops=len(lhs) * 2 * M * K * N,
    )  # fmt: skip
    result = Result(out_struct(out.shape, out.dtype, like=lhs[0]))
    a, b = tuple(gemm.rows(x) for x in lhs), tuple(gemm.weights(w) for w in rhs)
    args = [] if bias is None else [("columns", bias)]
    return ragged_gemm(gemm, a, b, offsets, (G, M, K, N), [result], args=args, cores=cores)[0]


def wgrad_triton(
    lhs, dout, accumulator, offsets, *, parts: None, shapes: Shapes, out_dtype, tiles: Tiles, cores: int,
) -> list[jax.Array]:  # fmt: skip
    """As `wgrad_pallas`, without parts; bfloat16 or float16, all widths multiples of 8."""
    ((G, K, N),), M = shapes, lhs.shape[0]
    before = None if accumulator is None else accumulator.reshape(-1, N)
    result = Result(out_struct((G * K, N), out_dtype, like=lhs), before, "kept" if before is None else "added")
    gemm = gemm_of(
        "grouped_matmul_wgrad", grouped_gemm, tiles, contraction=True, split=tiles.split, flops=2 * M * K * N,
    )  # fmt: skip
    a, b = (gemm.rows(lhs),), (gemm.weights(dout),)
    sums = ragged_gemm(gemm, a, b, offsets, (G, K, M, N), [result], cores=cores)[0]
    return [sums.reshape(G, K, N)]
