"""A step that is profiled while it is called."""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxops.profiling import trace
from jaxops.profiling.building import Recording, build
from jaxops.profiling.machine import ceilings
from jaxops.profiling.report import Report
from jaxops.profiling.scopes import own_metadata

# Without CUDA graphs, inside which the profiler does not see which instruction launched a kernel.
_WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


class Profiled:
    """A step function that is profiled by its calls: put it in the place of the step, and loop on.

    After `warmup` calls it times `steps` calls without the profiler, then records `steps` calls. If CUDA graphs hid
    which instructions launched the kernels, one more call runs the program compiled without them. From then on it is
    the step. It waits for results only between these parts. Each call returns the step's own result, and no argument is
    copied.

    The card's ceilings are measured at the first call, if they never were.

    Times are of a loop as it runs, with what stands between the calls.

    Args:
      step: jitted; or a function that calls jitted ones, of which CUDA graphs hide some origins.
      steps: timed, and recorded.
      warmup: calls before; at least 1, since the first one compiles.

    Raises:
      ValueError: a number is too small.
    """

    def __init__(self, step: Callable[..., Any], *, steps: int = 3, warmup: int = 2):
        for name, value in (("steps", steps), ("warmup", warmup)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: write a whole number of at least 1.")
        functools.update_wrapper(self, step, updated=())
        self._step, self._steps, self._warmup = step, steps, warmup
        self._calls = 0
        self._recording = Recording(steps)
        self._profiler = contextlib.ExitStack()
        self._began = 0.0

    @property
    def calls_needed(self) -> int:
        """Calls until it is done, at most."""
        return self._warmup + 2 * self._steps + 1

    @property
    def done(self) -> bool:
        """Whether the calls that a report needs have been made."""
        return self._recording.complete

    @functools.cached_property
    def report(self) -> Report:
        """The report.

        Raises:
          RuntimeError: too few calls were made.
        """
        if not self.done:
            raise RuntimeError(
                f"the step was called {self._calls} times; its profile needs {self.calls_needed}: {self._warmup} to "
                f"warm up, {self._steps} timed and {self._steps} recorded, and one without CUDA graphs."
            )
        return build(self._recording, ceilings())

    def __call__(self, *args, **kwargs):
        if self.done:
            return self._step(*args, **kwargs)
        number, self._calls = self._calls, self._calls + 1
        first_timed, first_recorded = self._warmup, self._warmup + self._steps
        try:
            if number < first_timed:
                return self._warm_up(number, args, kwargs)
            if number == first_recorded + self._steps:
                return self._call_without_graphs(args, kwargs)
            if number == first_recorded:
                self._recording.events = self._profiler.enter_context(trace.recorded())
            if number in (first_timed, first_recorded):
                self._began = time.perf_counter()
            result = self._step(*args, **kwargs)
            if number in (first_recorded - 1, first_recorded + self._steps - 1):
                jax.block_until_ready(result)
                self._end_part((time.perf_counter() - self._began) * 1e6 / self._steps)
            return result
        except BaseException:
            self._profiler.close()
            raise

    def _warm_up(self, number: int, args, kwargs):
        if number == 0:
            ceilings()  # measured before anything is recorded, if they never were
        with own_metadata():
            last = number == self._warmup - 1
            if last and hasattr(self._step, "lower"):
                compiled = self._step.lower(*args, **kwargs).compile()  # pyright: ignore[reportFunctionMemberAccess]
                self._recording.executable = compiled.runtime_executable()
            result = self._step(*args, **kwargs)
        return jax.block_until_ready(result) if last else result

    def _end_part(self, us: float) -> None:
        if self._calls == self._warmup + self._steps:
            self._recording.step_us = us
            return
        self._profiler.close()
        self._recording.profiled_us = us
        self._recording.find_programs()
        self._recording.complete = self._recording.executable is None or not self._recording.hidden

    def _call_without_graphs(self, args, kwargs):
        with own_metadata():
            lowered = self._step.lower(*args, **kwargs)  # pyright: ignore[reportFunctionMemberAccess]
            run = lowered.compile(compiler_options=_WITHOUT_GRAPHS)
            try:
                with trace.recorded() as plain:
                    result = jax.block_until_ready(run(*args, **kwargs))
                self._recording.plain = plain
            except TypeError:  # static arguments: a compiled program does not take them
                result = self._step(*args, **kwargs)
        self._recording.complete = True
        return result


def profile(step: Callable[..., Any], *args, steps: int = 3, warmup: int = 2, **kwargs) -> Report:
    """Where the time of `step(*args, **kwargs)` goes: calls it about ten times; see `Profiled`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxops.profiling import profile
    >>> report = profile(jax.jit(lambda x: jnp.tanh(x @ x)), jnp.ones((256, 256)))
    >>> round(report.accounted, 2)
    1.0

    Arguments that the step donates are copied first, so yours stay valid. After each call the result's part of the same
    structure, shapes and dtypes takes their place: a step `(state, batch) -> (state, metrics)` trains on. Where no
    memory is left for the copy, wrap the step of your own loop in `Profiled`.

    Args:
      step: see `Profiled`.
      steps, warmup: see `Profiled`.

    Raises:
      ValueError: `Profiled`'s, or the result has nothing that can take a donated argument's place.
    """
    profiled = Profiled(step, steps=steps, warmup=warmup)
    donated = _donated(step, args, kwargs)
    args = [jax.tree.map(_copy, each) if gone else each for each, gone in zip(args, donated, strict=True)]
    while not profiled.done:
        result = profiled(*args, **kwargs)
        args = _next(args, donated, result)
    return profiled.report


def _donated(step: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[bool]:
    """For each positional argument, whether the step donates part of it."""
    if not hasattr(step, "lower"):
        return [False] * len(args)
    infos = jax.tree.leaves(step.lower(*args, **kwargs).args_info)
    if not any(info.donated for info in infos):
        return [False] * len(args)
    counts = [len(jax.tree.leaves(each)) for each in args]
    if sum(counts) + len(jax.tree.leaves(kwargs)) != len(infos):
        raise ValueError(
            "the step donates arguments and has static ones or modules: which ones are donated is unclear. Wrap it in "
            "jaxops.profiling.Profiled and call that in your own loop."
        )
    starts = [sum(counts[:i]) for i in range(len(args))]
    return [any(info.donated for info in infos[start : start + n]) for start, n in zip(starts, counts, strict=True)]


def _copy(x: Any) -> Any:
    return x.copy() if isinstance(x, jax.Array) else x


def _next(args: Sequence[Any], donated: Sequence[bool], result: Any) -> list[Any]:
    """The arguments of the next call."""
    parts = [result]
    if isinstance(result, (tuple, list)):
        parts += result
    elif isinstance(result, dict):
        parts += result.values()
    found = []
    for number, (each, gone) in enumerate(zip(args, donated, strict=True)):
        if gone:
            place = next((i for i, part in enumerate(parts) if _alike(part, each)), None)
            if place is None:
                raise ValueError(
                    f"the step donates argument {number}, but nothing in its result has that argument's structure, "
                    "shapes and dtypes, to be passed to the next call. Wrap the step in jaxops.profiling.Profiled and "
                    "call that in your own loop."
                )
            each = parts.pop(place)
        found.append(each)
    return found


def _alike(one: Any, other: Any) -> bool:
    """Whether two pytrees have the same structure, shapes and dtypes; their arrays may be deleted."""
    types = [
        [(x.shape, x.dtype) if hasattr(x, "dtype") else type(x) for x in jax.tree.leaves(each)] for each in (one, other)
    ]
    return jax.tree.structure(one) == jax.tree.structure(other) and types[0] == types[1]
