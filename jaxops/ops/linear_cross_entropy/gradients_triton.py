"""The gradients of the logits that `logits_triton` made, in the same memory.

As a pass of XLA they get memory of their own: probably because the logits are one of several results of a kernel.
"""

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.gluon.activations_triton import tanh
from jaxops._lib.gluon.launch_triton import Scratch, triton_call

WORDS = 4096  # of a program: four loads of 16 bytes a thread
BLOCK, LAYOUT = gl.constexpr(WORDS), gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))


@gluon.jit
def logit_gradients_kernel(
    products_ptr, bias_ptr, targets_ptr, numbers_ptr, T, eighths, CAP: gl.constexpr, gradients_ptr
):  # fmt: skip
    """`BLOCK` words of a row a program. eighths: V / 8, so that Triton knows V's divisor: it loads 16 bytes."""
    V = 8 * eighths
    blocks = gl.cdiv(V, BLOCK)
    row = gl.program_id(0) // blocks
    word = gl.program_id(0) % blocks * BLOCK + gl.arange(0, BLOCK, layout=LAYOUT)
    at, inside = gl.cast(row, gl.int64) * V + word, word < V
    target, numbers = gl.load(targets_ptr + row), numbers_ptr + row
    log_sum, of_sum, of_target = gl.load(numbers), gl.load(numbers + T), gl.load(numbers + 2 * T)
    of_words, counts = gl.load(numbers + 3 * T), gl.load(numbers + 4 * T)
    products = gl.load(products_ptr + at, mask=inside, other=0.0)
    logits = products.to(gl.float32)
    if bias_ptr is not None:
        logits += gl.load(bias_ptr + word, mask=inside, other=0.0).to(gl.float32)
    slope = 1.0
    if CAP is not None:
        share = tanh(logits * (1.0 / CAP))
        logits, slope = CAP * share, 1.0 - share * share
    d = of_sum * gl.exp(logits - log_sum) - gl.where(word == target, of_target, 0.0) - of_words
    d = gl.where(counts != 0.0, d * slope, 0.0)
    gl.store(gradients_ptr + at, d.to(products.dtype), mask=inside)


def gradients_triton(
    products: jax.Array, bias: jax.Array | None, targets: jax.Array, numbers: jax.Array, *, soft_cap: float | None
) -> jax.Array:
    """products [T, V] as of `logits_triton`, bias [V] or None, targets [T], numbers [5, T] float32 -> the products'
    gradients, in their dtype.

    numbers: of each row the logarithm of the sum of exponentials; the gradients of it and of the target's logit; what
    is subtracted from each logit's gradient; and whether the row counts: others' gradients are 0.
    """
    T, V = products.shape
    return triton_call(
        Scratch(products, result=0), bias, targets, numbers, T, V // 8, kernel=logit_gradients_kernel,
        out_type=out_struct((T, V), products.dtype, like=products), grid=T * -(-V // WORDS), name="logit_gradients",
        flops=4 * T * V, CAP=soft_cap,
    )  # fmt: skip
