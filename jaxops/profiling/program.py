"""Profiles a step of another Python program, which knows nothing of it."""

import contextlib
import functools
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer

from jaxops._lib.python_program import ProgramError, run_program
from jaxops.profiling.profiled import Profiled
from jaxops.profiling.report import Report

_CHOOSE_AT = 3  # calls of the first function that is called so often


class _Ended(BaseException):
    """The report is complete, and nobody needs the rest of the program."""


class _Jitted:
    """Stands in the place of a jitted function, and passes its calls to the profiler."""

    def __init__(self, function: Any, watch: "_Watch"):
        functools.update_wrapper(self, function, updated=())
        self._function, self._watch = function, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args, **kwargs):
        return self._watch.call(self._function, args, kwargs)


class _Watch:
    """Chooses the step among the jitted functions of a program, and profiles it.

    Attributes:
      named: the step's name; without one, of the functions called twice when one is called a third time, that whose
        second call took longest.
      stop: whether the program ends when the report is complete.
    """

    def __init__(self, named: str, steps: int, stop: bool):
        self.named, self.stop = named, stop
        self.profiled: Profiled | None = None
        self.chosen: Any = None
        self.counts: dict[Any, int] = {}
        self.seconds: dict[Any, float] = {}
        self._steps = steps
        self._inside = False

    def call(self, function: Any, args, kwargs):
        # A call from inside another jitted function, while that one is traced, is part of it.
        if self._inside or any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs))):
            return function(*args, **kwargs)
        self._inside = True
        try:
            return self._outer_call(function, args, kwargs)
        finally:
            self._inside = False

    def _outer_call(self, function: Any, args, kwargs):
        number = self.counts[function] = self.counts.get(function, 0) + 1
        if self.chosen is None:
            self._choose(function, number)
        if self.profiled is not None and function is self.chosen:
            result = self.profiled(*args, **kwargs)
            if self.profiled.done and self.stop:
                raise _Ended
            return result
        if number != 2 or self.chosen is not None:
            return function(*args, **kwargs)
        begin = time.perf_counter()
        result = jax.block_until_ready(function(*args, **kwargs))
        self.seconds[function] = time.perf_counter() - begin
        return result

    def _choose(self, function: Any, number: int) -> None:
        if self.named:
            self.chosen = function if _name(function) == self.named else None
        elif number >= _CHOOSE_AT:
            self.chosen = max(self.seconds, key=lambda each: self.seconds[each])
        if self.chosen is not None:
            self.profiled = Profiled(self.chosen, steps=self._steps)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


@contextlib.contextmanager
def _watched(watch: _Watch) -> Iterator[None]:
    """Functions that are jitted inside, with `jax.jit` or what calls it, are watched."""
    original = jax.jit

    @functools.wraps(original)
    def jit(*args, **kwargs):
        if not args:  # a decorator with options
            return lambda function: jit(function, **kwargs)
        return _Jitted(original(*args, **kwargs), watch)

    jax.jit = jit  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        jax.jit = original


def profile_program(
    words: Sequence[str], *, function: str = "", steps: int = 3, stop: bool = False, say: Callable[[str], Any] = print
) -> Report:
    """Runs a Python program in this process and profiles its step.

    Args:
      words: `[python] -m MODULE ...` or `[python] FILE.py ...`.
      function: name of the jitted function; by default, of those called at least twice when one is called a third time,
        the one whose second call took longest.
      steps: as of `Profiled`.
      stop: end the program when the report is complete.
      say: gets a line about the function, and one about how the program ended.

    Raises:
      ProgramError: other words; or the program made too few calls of a jitted function.
    """
    watch = _Watch(function, steps, stop)
    try:
        with _watched(watch):
            run_program(words)
    except _Ended:
        pass
    except SystemExit as ended:
        if ended.code not in (None, 0):
            say(f"The program ended with status {ended.code}.")
    except Exception as error:
        if watch.profiled is None or not watch.profiled.done:
            raise
        say(f"The program failed after its profile was complete: {type(error).__name__}: {error}")
    counts = {_name(each): count for each, count in watch.counts.items()}
    if watch.profiled is None or not watch.profiled.done:
        called = ", ".join(f"{name} {count} times" for name, count in counts.items()) or "none"
        needed = Profiled(lambda: None, steps=steps).calls_needed + (0 if function else _CHOOSE_AT - 1)
        raise ProgramError(
            f"the program called no jitted function often enough: a profile needs {needed} calls of one"
            f"{' called ' + repr(function) if function else ''}. Called were: {called}."
        )
    say(f"profiled {_name(watch.chosen)!r}; jitted functions and their calls: {counts}")
    return watch.profiled.report
