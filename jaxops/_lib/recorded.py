"""Which problems plans are made for, while functions are traced."""

import collections
import contextlib
import dataclasses
from collections.abc import Hashable, Iterator

import jax


@dataclasses.dataclass(frozen=True, eq=False)
class _Record:
    problems: collections.Counter = dataclasses.field(default_factory=collections.Counter)


# Of the innermost `record`; None outside. JAX keys its caches of traced and compiled functions with it.
_record = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def record() -> Iterator[collections.Counter]:
    """Counts the problems that plans are made for inside, in this thread. Functions compiled before are traced again.

    A function that is traced once counts once, however often it runs: a scan over layers is one.

    >>> import jax.numpy as jnp, jaxops
    >>> from jaxops.tuning import record
    >>> with record() as problems:
    ...     out = jaxops.adaln(jnp.ones((4, 8)), jnp.zeros((1, 8)), jnp.ones((1, 8)))
    >>> list(problems)
    [Problem(T=4, D=8, B=1, dtype='float32', gated=False, fp8=False)]

    Yields:
      A Counter of Problems (`jaxops.ops.<op>.Problem`), filled as plans are made.
    """
    made = _Record()
    with _record(made):
        yield made.problems


def note(problem: Hashable) -> None:
    """Counts a problem, inside `record`."""
    if (made := _record.value) is not None:
        made.problems[problem] += 1
