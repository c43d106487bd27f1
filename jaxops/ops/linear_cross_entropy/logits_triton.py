"""The logits of the last layer on Hopper, with each row's statistics of them in the product's epilogue: no pass reads
the logits for those."""

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.gluon.activations_triton import exp2_of, round_pairs, tanh, widen_pairs
from jaxops._lib.gluon.epilogue_triton import column_numbers
from jaxops._lib.gluon.ragged_gemm_triton import Result, gemm_of, ragged_gemm
from jaxops.ops.grouped_matmul import Tiles

LOG2_E, LN_2 = gl.constexpr(1.4426950408889634), gl.constexpr(0.6931471805599453)
INFINITY = gl.constexpr(float("inf"))


@gluon.jit
def linear_cross_entropy(acc, operands, tile, VARIANT: gl.constexpr):
    """The products, rounded, and of each row's logits made of them the logarithm of the sum of exponentials and, for
    label smoothing, the sum. operands: the number of words, and the bias, if there is one. VARIANT: the soft cap or
    None, and whether the sum is wanted."""
    CAP: gl.constexpr = VARIANT[0]
    if tile.dtype == gl.bfloat16:
        products = round_pairs(acc)
        logits = widen_pairs(products)
    else:
        products = acc.to(tile.dtype)
        logits = products.to(gl.float32)
    if len(operands) > 1:
        logits = logits + operands[1].to(gl.float32)
    if CAP is not None:
        logits = CAP * tanh(logits * (1.0 / CAP))
    SHAPE: gl.constexpr = acc.shape
    total = None
    if VARIANT[1]:
        word = tile.col + column_numbers(SHAPE) < operands[0]
        total = gl.sum(gl.where(word[None, :], logits, 0.0), axis=1)
    if tile.col + SHAPE[1] > operands[0]:
        word = tile.col + column_numbers(SHAPE) < operands[0]
        logits = gl.where(word[None, :], logits, -INFINITY)
    most = gl.max(logits, axis=1) * LOG2_E
    most = gl.where(most == -INFINITY, 0.0, most)  # a bias may be -inf
    sums = gl.sum(exp2_of(logits, most[:, None]), axis=1)
    log_sums = (most + gl.log2(sums)) * LN_2
    if VARIANT[1]:
        return products, log_sums, total
    else:  # noqa: RET505  # decided at compile time
        return products, log_sums


def logits_triton(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, *, transpose_w: bool, soft_cap: float | None, total: bool,
    tiles: Tiles, cores: int,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """x [T, D], w [D, V] or [V, D] -> x @ w [T, V] in their dtype, and of the logits (with bias and soft cap), for each
    `tiles.stored` columns, [cdiv(V, tiles.stored), T] float32: the logarithms of the sums of exponentials and, with
    total, the sums. bfloat16 or float16, D and V multiples of 8; no size is 0."""
    (T, D), V = x.shape, w.shape[0 if transpose_w else 1]
    gemm = gemm_of(
        "linear_cross_entropy", linear_cross_entropy, tiles, transposed=transpose_w, variant=(soft_cap, total),
        flops=2 * T * D * V,
    )  # fmt: skip
    numbers = Result(out_struct((-(-V // tiles.stored), T), jnp.float32, like=x), tma=False)
    results = [Result(out_struct((T, V), x.dtype, like=x)), numbers, *[numbers] * total]
    args = [("value", V)] + ([] if bias is None else [("columns", bias[None])])
    a, b = (gemm.rows(x),), (gemm.weights(w[None]),)
    offsets = T * jnp.arange(2, dtype=jnp.int32)  # no constant, which `partitioned` could not take
    return ragged_gemm(gemm, a, b, offsets, (1, T, D, V), results, args=args, cores=cores)
