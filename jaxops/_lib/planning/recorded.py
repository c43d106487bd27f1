"""Which problems plans are made for, and why each plan is as it is, while functions are traced."""

import collections
import contextlib
import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any

from jaxops._lib.planning import jit_keys


@dataclasses.dataclass(frozen=True, eq=False)
class _Record:
    problems: collections.Counter = dataclasses.field(default_factory=collections.Counter)


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
    with jit_keys.problems(made):
        yield made.problems


def note(problem: Hashable) -> None:
    """Counts a problem, inside `record`."""
    if (made := jit_keys.problems.value) is not None:
        made.problems[problem] += 1


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the tiles of one pass are from.

    Attributes:
      kind: "explicit" (in the plan that was passed), "tuned" (a row) or "heuristic".
      key: what rows are looked up by; None for "explicit", and where the op has no rows.
      row: the tuned row.
    """

    kind: str
    key: tuple | None = None
    row: dict | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """A call of `make_plan`.

    Attributes:
      op, problem: which op's, and of what.
      given: the plan that was passed; without one a plan of the backend alone.
      plan: the result.
      sources: of each pass that has tiles.
      parts: the decisions made inside this one, of ops that this op is made of.
    """

    op: str
    problem: Any
    given: Any
    plan: Any
    sources: dict[str, Source]
    parts: tuple["Decision", ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Watch:
    decisions: list[Decision] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def watch() -> Iterator[list[Decision]]:
    """Collects what `make_plan` decides inside, in this thread, in the order of the calls."""
    made = _Watch()
    with jit_keys.plans_watched(made):
        yield made.decisions


def watched() -> list[Decision] | None:
    """The list of the innermost `watch`; None outside."""
    return None if (made := jit_keys.plans_watched.value) is None else made.decisions
