"""Options of JAX for the whole process, as a user sets them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def configured(**options: Any) -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
