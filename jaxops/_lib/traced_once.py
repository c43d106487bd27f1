"""Launches that a program may have many of."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def traced_once(*static: str) -> Callable[[Callable], Any]:
    """`jax.jit` with these arguments static: equal launches are traced and lowered once, however many layers a program has one after another.

    Of a Pallas kernel that takes a tenth of a second. XLA inlines the calls.
    """
    return functools.partial(jax.jit, static_argnames=static)
