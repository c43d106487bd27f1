"""What XLA compiles."""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from tests.configured import configured

COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations() -> Iterator[collections.Counter[str]]:
    """How often a program of each name is compiled inside; without JAX's cache on disk, which would hide a second
    time."""
    found = collections.Counter()

    def count(event: str, duration_secs: float, **given: Any) -> None:
        if event == COMPILED and duration_secs:
            found[given["fun_name"].removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        with configured(jax_enable_compilation_cache=False):
            yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
