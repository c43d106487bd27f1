"""The gradient of the down projection's rows on Hopper, with the gated unit's backward as its epilogue: the gradients
of gate and up, the rows that the down projection's weight gradient multiplies, and each row's share of its router
weight's gradient.

Ping-pong over tiles of 128 x 128: one consumer runs the epilogue while the other multiplies. H200, 2026-11-22: 284 us
at qwen3_30b with 4,096 tokens, 1,606 with 32,768, 6,763 at mixtral. The product alone takes 203, 1,110 and 5,450 (with
tiles of 128 x 256 in the last two), a separate pass for the activation's gradients 58, 465 and 1,084 more. Without its
stores and formulas this kernel takes 216, 1,200 and 5,503: the epilogue is not fully hidden.
"""

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.gluon.activations_triton import activate_and_slope, linear_part, through_linear_part
from jaxops._lib.gluon.ragged_gemm_triton import Gemm, Result, ragged_gemm
from jaxops._lib.gluon.stores_triton import split_columns

BM = gl.constexpr(128)  # rows and columns of a tile
PIECE = gl.constexpr(64)  # columns that are loaded, activated and stored at a time


@gluon.jit
def _join_columns(left, right):
    return gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _unit_gradients(dh, gate, up, weight, PIECES: gl.constexpr, ACTIVATION: gl.constexpr):
    """dgate, dup, weight * h (rounded), and each row's sum of dh * h, of dh before the router's weights. In pieces of
    columns, one after another: the intermediate values of all at once do not fit the registers beside the tile's
    accumulators."""
    if PIECES > 1:
        dh0, dh1 = split_columns(dh)
        gate0, gate1 = split_columns(gate)
        up0, up1 = split_columns(up)
        weight0, weight1 = split_columns(weight)
        dgate0, dup0, h0, dot0 = _unit_gradients(dh0, gate0, up0, weight0, PIECES // 2, ACTIVATION)
        dgate1, dup1, h1, dot1 = _unit_gradients(dh1, gate1, up1, weight1, PIECES // 2, ACTIVATION)
        return _join_columns(dgate0, dgate1), _join_columns(dup0, dup1), _join_columns(h0, h1), dot0 + dot1
    else:  # noqa: RET505  # decided at compile time
        value, slope = activate_and_slope(gate, ACTIVATION)
        factor = linear_part(up, ACTIVATION)
        h = value * factor
        dot = dh * h
        dh = dh * weight
        dgate = (dh * factor * slope).to(gate.dtype)
        dup = through_linear_part(dh * value, up, ACTIVATION).to(gate.dtype)
        return dgate, dup, (h * weight).to(gate.dtype), dot


@gluon.jit
def moe_mlp_bwd(acc, operands, tile, ACTIVATION: gl.constexpr):
    """dgate, dup, h and the row sums. operands: gate and up, and the rows' router weights."""
    gate, up, weight = operands
    dgate, dup, h, dot = _unit_gradients(acc, gate, up, weight.broadcast_to(acc.shape), 4, ACTIVATION)
    return dgate, dup, h, gl.sum(dot, axis=1)


def bwd_triton(
    dy: jax.Array, w_down: jax.Array, pre: tuple[jax.Array, ...], weights: jax.Array, offsets: jax.Array, *,
    activation: str, panel: int, cores: int,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """dy [R, D], each token's cotangent in the rows of its choices; w_down [E, F, D]; pre: gate and up [R, F], or one
    array [R, 2 F]; weights [R] float32 of the rows; offsets [E + 1] -> the gradients of pre, in its memory, the
    weighted unit [R, F], and [cdiv(F, 64), R] float32, whose column sums are the weights' gradients. bfloat16 or
    float16, D and F multiples of 8; no size is 0."""
    (R, D), (E, F, _) = dy.shape, w_down.shape
    gemm = Gemm(
        "moe_mlp_bwd", moe_mlp_bwd, BM.value, BM.value, 4, panel, (BM.value, PIECE.value), ping_pong=True,
        transposed=True, buffers=3, piece=(PIECE.value, PIECE.value), variant=activation,
        flops=2 * R * F * D,
    )  # fmt: skip
    loaded = [Result(out_struct(x.shape, dy.dtype, like=dy), x, "loaded", halves=2 // len(pre)) for x in pre]
    dots = Result(out_struct((-(-F // PIECE.value), R), jnp.float32, like=dy), tma=False)
    results = [*loaded, Result(out_struct((R, F), dy.dtype, like=dy)), dots]
    a, b = (gemm.rows(dy),), (gemm.weights(w_down),)
    return ragged_gemm(gemm, a, b, offsets, (E, R, D, F), results, args=[("rows", weights)], cores=cores)
