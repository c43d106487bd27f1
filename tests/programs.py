"""Compiled programs that tests share."""

import functools
import inspect
from collections.abc import Callable

import jax


def jit_once(*static: str) -> Callable[[Callable], Callable]:
    """`jax.jit` with static arguments, one program however they are passed. JAX's cache tells apart a default, a
    position and a keyword."""

    def decorate(function: Callable) -> Callable:
        signature, compiled = inspect.signature(function), jax.jit(function, static_argnames=static)

        @functools.wraps(function)
        def call(*args, **named):
            given = signature.bind(*args, **named)
            given.apply_defaults()
            return compiled(*given.args)

        return call

    return decorate
