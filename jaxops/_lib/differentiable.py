"""How an op gets its gradient: one `jax.custom_vjp` that is compiled once, also where nothing around it is under `jax.jit`."""

from collections.abc import Callable
from typing import Any

import jax


def differentiable(
    forward: Callable, fwd: Callable, bwd: Callable, *, static: int, symbolic_zeros: bool = False
) -> Any:
    """`forward` with `fwd` and `bwd` as its `jax.custom_vjp` rules, under `jax.jit`.

    Outside of `jax.jit` the second call with equal shapes compiles nothing, nor does its gradient. Inside `jax.jit` the call is inlined where it is traced.

    Args:
      forward: the op; its first `static` arguments are static and hashable.
      fwd: takes what forward takes; returns its result and what the backward needs.
      bwd: takes the static arguments, what fwd has saved, and the cotangents of the result.
      symbolic_zeros: as in `jax.custom_vjp.defvjp`; then the op is not under `jax.jit`.
    """
    places = tuple(range(static))
    op = jax.custom_vjp(forward, nondiff_argnums=places)
    op.defvjp(fwd, bwd, symbolic_zeros=symbolic_zeros)
    if symbolic_zeros:
        # One traced call serves every choice of differentiated arguments under jax.jit, but what fwd saves depends on that choice.
        return op
    return jax.jit(op, static_argnums=places, inline=True)
