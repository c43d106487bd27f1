"""Kernel launchers that are traced and lowered once."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def traced_once(*static: str) -> Callable[[Callable], Any]:
    """`jax.jit` with these arguments static, for a launcher: all calls of a program with equal shapes share one trace
    and one lowering, which take a tenth of a second for a Pallas kernel. XLA inlines the calls."""
    return functools.partial(jax.jit, static_argnames=static)
