"""float32 arithmetic that a Pallas kernel does in fewer instructions than XLA's compiler takes for it, with equal bits.

XLA compiles kernels without flushing of subnormal numbers and without fusing products into sums: a root or a power of
two is then four to six instructions, of which all but one are for subnormal numbers, and a number of a bfloat16 pair is
taken out in two. Outside of a kernel for a GPU these functions are plain JAX.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

_ASSEMBLE: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("assemble", default=None)
_HALVES = "shl.b32 $0, {pair}, 16; and.b32 $1, {pair}, 0xffff0000;"


@contextlib.contextmanager
def assembled_by(assemble: Callable | None) -> Iterator[None]:
    """What is traced inside uses `assemble(asm, x, constraints, pack)`, a float32 array of x's shape; None: plain JAX.

    Args:
      assemble: `pack` elements of x are the operands of one copy of the assembly.
    """
    token = _ASSEMBLE.set(assemble)
    try:
        yield
    finally:
        _ASSEMBLE.reset(token)


def rsqrt(x: jax.Array) -> jax.Array:
    """1 / sqrt(x) of float32 x that is not subnormal."""
    assemble = _ASSEMBLE.get()
    return lax.rsqrt(x) if assemble is None else assemble("rsqrt.approx.ftz.f32 $0, $1;", x, "=f,f", 1)


def exp2(x: jax.Array) -> jax.Array:
    """2**x of float32; zero or subnormal below the least normal number."""
    assemble = _ASSEMBLE.get()
    return jnp.exp2(x) if assemble is None else assemble("ex2.approx.ftz.f32 $0, $1;", x, "=f,f", 1)


def widened(x: jax.Array) -> jax.Array:
    """x in float32."""
    assemble = _ASSEMBLE.get()
    if assemble is None or x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    return assemble(_HALVES.format(pair="$2"), x, "=r,=r,r", 2)


def infinity_to_nan(x: jax.Array, in_pairs: bool = True) -> jax.Array:
    """x in float32, with NaN for infinities: infinity times zero is NaN, so this is a multiply-add in x's dtype.

    Args:
      in_pairs: two bfloat16 numbers by one instruction. Some kernels then take more registers.
    """
    assemble = _ASSEMBLE.get() if in_pairs else None
    if assemble is None or x.dtype != jnp.bfloat16:
        return (x * 0.0 + x).astype(jnp.float32)
    asm = "{ .reg .b32 zero, pair; mov.b32 zero, 0; fma.rn.bf16x2 pair, $2, zero, $2; " + _HALVES.format(pair="pair")
    return assemble(asm + " }", x, "=r,=r,r", 2)
