"""The router's linear map in true float32, at about the price of TF32."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.checks import check_choice
from jaxops._lib.arrays.differentiable import differentiable, differentiable_as
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.symbolic import is_symbolic
from jaxops._lib.planning.costs import Cost, takes
from jaxops._lib.planning.device import device_of
from jaxops.ops.route.logits_pallas import logits_pallas

_MAX_LENGTH = 4096  # of a sum on tensor cores, which truncate instead of rounding: longer sums are split
# Tokens up to which one kernel reads the float32 kernel for each of them. XLA would write the three parts to memory,
# multiply, and sum: three kernels, and of a single token all products.
_FEW = 16
_PRODUCT: Any = {"precision": lax.Precision.DEFAULT, "preferred_element_type": jnp.float32}


def router_logits(x: jax.Array, kernel: jax.Array, *, backend: str = "auto") -> jax.Array:
    """x @ kernel in float32, not in TF32, a GPU's default; the kernel's gradient has the same precision.

    On a GPU with bfloat16 tensor cores, a float32 number is split into a sum of three bfloat16 numbers, whose products
    are exact in float32. With bfloat16 tokens one product with three times the columns then has the precision of
    float32, in a half to a sixth of its time (H200, benchmarks/results/nvidia_h200/router.jsonl). The gradient of x,
    which is rounded to bfloat16 anyway, omits terms below 2^-16 of it. Source: Henry, Tang, Heinecke, "Leveraging the
    bfloat16 Artificial Intelligence Datatype for Higher-Precision Computations", 2019.

    At most 16 bfloat16 tokens, as of a decode step, are multiplied in float32 by a Pallas kernel: nearly all of its
    time is reading the matrix.

    Args:
      x: [T, D], bfloat16, float16 or float32.
      kernel: [D, E], cast to float32.
      backend: "xla" takes no Pallas kernel; "auto" and "pallas" take it for few tokens.

    Returns:
      [T, E] float32. The residual is x itself, not a float32 copy.

    Raises:
      ValueError: an unknown backend.
    """
    check_choice("backend", backend, ("auto", "pallas", "xla"))
    kernel = kernel.astype(jnp.float32)
    device = device_of(x, kernel)
    if x.dtype == jnp.bfloat16 and device.has((8, 0)) and not is_symbolic(x.shape[0]):
        few = backend != "xla" and 0 < x.shape[0] <= _FEW and kernel.size > 0
        return _split_matmul(few, device.interpret, *vary_together(x, kernel))
    return jax.checkpoint(_plain)(x, kernel)


def _plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.matmul(x.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)


def _split(a: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays with the sum a."""
    parts = []
    for _ in range(3):
        # XLA may remove a cast to bfloat16 and back, but not this.
        part = lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        a = a - part
    return parts


def _product(a: jax.Array, b: jax.Array, dimensions: Any) -> jax.Array:
    """`lax.dot_general` that states its time for XLA's scheduler.

    The scheduler assumes 1,200 to 1,700 us for these thin products, which take 25 to 42 (16,384 tokens of 2,048
    numbers, 64 experts, H200, 2026-11-25), and would leave a collective beside one of them exposed.
    """
    call = lambda a, b: lax.dot_general(a, b, dimensions, **_PRODUCT)
    out = jax.eval_shape(call, a, b)
    contracted = math.prod(a.shape[i] for i in dimensions[0][0])
    with takes(Cost.of(2 * out.size * contracted, (a, b), (out,), None).nanoseconds):
        return call(a, b)


def _dot_of_float32(x: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """bfloat16 x contracted over this axis with float32 b [length of that axis, E]."""
    length, E = b.shape
    pieces = next((n for n in range(-(-length // _MAX_LENGTH), 65) if n and length % n == 0), 1)
    x = x.reshape(*x.shape[:axis], pieces, length // pieces, *x.shape[axis + 1 :])
    parts = jnp.concatenate(_split(b), axis=1).reshape(pieces, length // pieces, 3 * E)
    products = _product(x, parts, (((axis + 1,), (1,)), ((axis,), (0,))))
    large, middle, small = jnp.split(jnp.sum(products, axis=0), 3, axis=1)
    return large + (middle + small)  # the smallest first


def _forward(few: bool, interpret: bool, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return logits_pallas(x, kernel, interpret=interpret) if few else _dot_of_float32(x, kernel, 1)


def _backward(x: jax.Array, kernel: jax.Array, dlogits: jax.Array) -> tuple[jax.Array, jax.Array]:
    d, k = _split(dlogits), _split(kernel)
    d, k = (jnp.concatenate(parts, axis=1) for parts in ((d[0], d[0], d[1]), (k[0], k[1], k[0])))
    dx = _product(d, k, (((1,), (1,)), ((), ())))
    return dx.astype(x.dtype), _dot_of_float32(x, dlogits, 0)


def _plain_backward(x: jax.Array, kernel: jax.Array, dlogits: jax.Array):
    return jax.vjp(_plain, x, kernel)[1](dlogits)


_gradients = differentiable_as(_backward, _plain_backward, static=0)


def _fwd(few: bool, interpret: bool, x: jax.Array, kernel: jax.Array):
    return _split_matmul(few, interpret, x, kernel), (x, kernel)


def _bwd(few: bool, interpret: bool, operands, dlogits: jax.Array):
    return _gradients(*operands, dlogits)


_split_matmul = differentiable(_forward, _fwd, _bwd, static=2)
