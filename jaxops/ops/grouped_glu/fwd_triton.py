"""A gated linear unit over ragged groups on Hopper: both products, side by side in one tile, and the activation in one
kernel.

Gate's and up's columns lie beside each other in shared memory, so that one instruction multiplies both, and in one
thread's registers.
"""

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.gluon.activations_triton import activate, linear_part
from jaxops._lib.gluon.ragged_gemm_triton import Gemm, Result, ragged_gemm
from jaxops._lib.gluon.stores_triton import split_columns

BM, BF = 128, 128  # rows, and columns of h, of a tile


@gluon.jit
def grouped_glu(acc, operands, tile, ACTIVATION: gl.constexpr):
    """h = act(gate) * up, gate and up. They are activated as they are saved: the backward sees the same numbers.
    operands: the biases of both, if there are any."""
    if len(operands) > 0:
        acc = acc + operands[0]
    gate, up = split_columns(acc.to(tile.dtype))
    return activate(gate, ACTIVATION) * linear_part(up, ACTIVATION), gate, up


def fwd_triton(
    x: jax.Array, weights: tuple[jax.Array, ...], bias: jax.Array | None, offsets: jax.Array,
    indices: jax.Array | None = None, *, activation: str, save: bool, panel: int, stages: int, cores: int,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """x[M, K], gate's and up's weights [G, K, F], offsets[G + 1] -> h [M, F], and with save the pre-activations, gate
    and up [M, F]. The weights may be one array [G, K, 2 F]; so are then the pre-activations [M, 2 F]. bias: [G, 2 F]
    float32, gate's columns first. With indices [M], row m is x[indices[m]], and K is a multiple of 64. bfloat16 or
    float16, K and F multiples of 8; no size is 0."""
    (T, K), (G, _, N), joined = x.shape, weights[0].shape, len(weights) == 1
    F = N // 2 if joined else N
    M = T if indices is None else indices.shape[0]
    gemm = Gemm(
        "grouped_glu_fwd", grouped_glu, BM, 2 * BF, stages, panel, (BM // 2, BF), operands="beside",
        buffers=5 - stages, piece=(BM // 2, 2 * BF), variant=activation, flops=2 * 2 * M * K * F,
    )  # fmt: skip
    h, pre = (Result(out_struct((M, n), x.dtype, like=x), halves=n // F) for n in (F, N))
    gathered = {} if indices is None else {"gather": (x, indices, T)}
    a, b = () if gathered else (gemm.rows(x),), tuple(gemm.weights(w) for w in weights)
    results, args = [h] + [pre] * len(weights) * save, [] if bias is None else [("beside", bias)]
    return ragged_gemm(gemm, a, b, offsets, (G, M, K, F), results, args=args, **gathered, cores=cores)
