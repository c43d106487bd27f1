"""How an op gets its gradient: a `jax.custom_vjp` under `jax.jit`, so that eager calls compile once, too."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def differentiable(
    forward: Callable, fwd: Callable, bwd: Callable, *, static: int, symbolic_zeros: bool = False
) -> Any:
    """`forward` with the `jax.custom_vjp` rules `fwd` and `bwd`, under `jax.jit`.

    Outside of `jax.jit` a second call with equal shapes compiles nothing, nor does its gradient. Inside of `jax.jit`
    the call is inlined.

    Args:
      forward: the op; its first `static` arguments are static and hashable. The others are pytrees, such as a Routing.
      fwd: takes forward's arguments; returns its result and the residuals.
      bwd: takes the static arguments, the residuals and the result's cotangents; returns a cotangent for each argument.
        None, for an argument or for a part of its pytree, is a zero cotangent.
      symbolic_zeros: as in `jax.custom_vjp.defvjp`; the op is then not under `jax.jit`.
    """
    static_argnums = tuple(range(static))
    op = jax.custom_vjp(forward, nondiff_argnums=static_argnums)
    op.defvjp(fwd, bwd, symbolic_zeros=symbolic_zeros)
    if symbolic_zeros:
        # jax.jit traces once for all choices of differentiated arguments, but fwd's residuals depend on that choice.
        return op
    return jax.jit(op, static_argnums=static_argnums, inline=True)


def differentiable_as(forward: Callable, plain: Callable, *, static: int) -> Any:
    """`differentiable`, with JAX's own gradient of `plain`: a function of the same arguments, result and meaning, made
    of operations that JAX can differentiate (any number of times). The operands are the residuals."""

    def fwd(*arguments):
        return op(*arguments), arguments[static:]

    def bwd(*arguments):
        *static_arguments, operands, cotangents = arguments
        _, vjp = jax.vjp(functools.partial(plain, *static_arguments), *operands)
        return vjp(cotangents)

    op = differentiable(forward, fwd, bwd, static=static)
    return op
