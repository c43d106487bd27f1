"""The router's linear map in true float32, at about the price of TF32."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.device import device_of
from jaxops._lib.differentiable import differentiable
from jaxops._lib.manual_axes import vary_together


def router_logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x @ kernel in float32, not in TF32, which is a GPU's default; the gradient of the kernel is as precise.

    On a GPU with tensor cores for bfloat16, a float32 number is taken as the sum of three bfloat16 numbers. Products
    of bfloat16 numbers are exact in float32. So with bfloat16 tokens one product with three times as many columns
    gives what float32 gives, in half to a sixth of its time (H200, benchmarks/results/nvidia_h200/router.jsonl). The
    gradient of x, which is rounded to bfloat16 in the end, leaves out what is below 2^-16 of it. Source: Henry, Tang,
    Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype for Higher-Precision Computations", 2019.

    Args:
      x: [T, D], bfloat16, float16 or float32.
      kernel: [D, E], cast to float32.

    Returns:
      [T, E] float32. The backward keeps x as it came, and no copy in float32.
    """
    kernel = kernel.astype(jnp.float32)
    if x.dtype == jnp.bfloat16 and device_of(x, kernel).has((8, 0)):
        return _in_parts(*vary_together(x, kernel))
    return jax.checkpoint(_plain)(x, kernel)


def _plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.matmul(x.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)


def _parts(a: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays with the sum a."""
    found = []
    for _ in range(3):
        part = lax.reduce_precision(
            a, exponent_bits=8, mantissa_bits=7
        )  # XLA may leave out a cast to bfloat16 and back, but not this
        found.append(part.astype(jnp.bfloat16))
        a = a - part
    return found


_LONGEST = 4096
_HOW: Any = {"precision": lax.Precision.DEFAULT, "preferred_element_type": jnp.float32}


def _dot_of_float32(x: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Of x in bfloat16, over this axis, and b [length of that axis, E] in float32."""
    length, E = b.shape
    # Tensor cores do not round what they add, they cut it off: longer sums are added from pieces.
    pieces = next((n for n in range(-(-length // _LONGEST), 65) if n and length % n == 0), 1)
    x = x.reshape(*x.shape[:axis], pieces, length // pieces, *x.shape[axis + 1 :])
    parts = jnp.concatenate(_parts(b), axis=1).reshape(pieces, length // pieces, 3 * E)
    found = lax.dot_general(x, parts, (((axis + 1,), (1,)), ((axis,), (0,))), **_HOW)
    large, middle, small = jnp.split(jnp.sum(found, axis=0), 3, axis=1)
    return large + (middle + small)  # the least first


def _forward(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _dot_of_float32(x, kernel, 1)


def _find_gradients(x: jax.Array, kernel: jax.Array, dlogits: jax.Array) -> tuple[jax.Array, jax.Array]:
    d, k = _parts(dlogits), _parts(kernel)
    of_logits, of_kernel = (jnp.concatenate(parts, axis=1) for parts in ((d[0], d[0], d[1]), (k[0], k[1], k[0])))
    dx = lax.dot_general(of_logits, of_kernel, (((1,), (1,)), ((), ())), **_HOW)
    return dx.astype(x.dtype), _dot_of_float32(x, dlogits, 0)


def _gradients_fwd(*operands: jax.Array):
    return _gradients(*operands), operands


def _gradients_bwd(operands, cotangents):
    """Second derivatives are JAX's own, of the plain product."""
    _, vjp = jax.vjp(lambda x, kernel, dlogits: jax.vjp(_plain, x, kernel)[1](dlogits), *operands)
    return vjp(cotangents)


_gradients = differentiable(_find_gradients, _gradients_fwd, _gradients_bwd, static=0)


def _fwd(x: jax.Array, kernel: jax.Array):
    return _in_parts(x, kernel), (x, kernel)


def _bwd(operands, dlogits: jax.Array):
    x, kernel = operands
    return _gradients(x, kernel, dlogits)


_in_parts = differentiable(_forward, _fwd, _bwd, static=0)
