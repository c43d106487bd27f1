"""Code that a test has changed, traced once more."""

import contextlib
from collections.abc import Iterator

import jax

_which = jax.make_user_context(default_value=None)  # in the keys of JAX's caches


@contextlib.contextmanager
def traced_anew() -> Iterator[None]:
    """What JAX has traced and compiled before is not taken inside, and nothing of what it does inside afterwards.

    Its caches stay: the next tests need them.
    """
    with _which(object()):
        yield
