"""A step that is profiled while it is called."""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxops.profiling import trace
from jaxops.profiling.building import Recording, build, largest_program, programs_of
from jaxops.profiling.machine import ceilings
from jaxops.profiling.report import Report
from jaxops.profiling.scopes import own_metadata

# Without CUDA graphs, inside which the profiler does not see which instruction launched a kernel.
_WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


class Profiled:
    """A step function that is profiled by its calls: put it in the place of the step, and loop on.

    After `warmup` calls it times `steps` calls. The next call compiles the step without CUDA graphs, which hide the
    instructions that launch kernels; `steps` calls of that program are recorded. From then on it is the step. It waits
    for results only between these parts. Each call returns the step's own result, and no argument is copied.

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
        self._without_graphs: Any = None
        self._profiler = contextlib.ExitStack()
        self._events: list[trace.Event] = []
        self._began_s, self._step_us = 0.0, 0.0
        self._recording: Recording | None = None

    @property
    def calls_needed(self) -> int:
        """Calls until it is done."""
        return self._warmup + 2 * self._steps + 1

    @property
    def done(self) -> bool:
        """Whether the calls that a report needs have been made."""
        return self._recording is not None

    @functools.cached_property
    def report(self) -> Report:
        """The report.

        Raises:
          RuntimeError: too few calls were made.
        """
        if self._recording is None:
            raise RuntimeError(
                f"the step was called {self._calls} times; its profile needs {self.calls_needed}: {self._warmup} to "
                f"warm up, {self._steps} timed, one that compiles without CUDA graphs, and {self._steps} recorded."
            )
        return build(self._recording, ceilings())

    def __call__(self, *args, **kwargs):
        if self.done:
            return self._step(*args, **kwargs)
        number, self._calls = self._calls, self._calls + 1
        first_timed, compiling = self._warmup, self._warmup + self._steps
        if number == 0:
            ceilings()  # before anything is recorded
        try:
            if number == compiling + 1:
                self._events = self._profiler.enter_context(trace.recorded())
            if number in (first_timed, compiling + 1):
                self._began_s = time.perf_counter()
            result = self._run(number, args, kwargs)
            if number + 1 in (first_timed, compiling, compiling + 1, self.calls_needed):
                jax.block_until_ready(result)
                us = (time.perf_counter() - self._began_s) * 1e6 / self._steps
                if number + 1 == compiling:
                    self._step_us = us
                elif number + 1 == self.calls_needed:
                    self._profiler.close()
                    self._recording = self._recorded(us)
            return result
        except BaseException:
            self._profiler.close()
            raise

    def _run(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        if number < self._warmup:
            with own_metadata():
                return self._step(*args, **kwargs)
        if number < self._warmup + self._steps or not hasattr(self._step, "lower"):
            return self._step(*args, **kwargs)
        if self._without_graphs is None:
            with own_metadata():
                lowered = self._step.lower(*args, **kwargs)  # pyright: ignore[reportFunctionMemberAccess]
                self._without_graphs = lowered.compile(compiler_options=_WITHOUT_GRAPHS)
        try:
            return self._without_graphs(*args, **kwargs)
        except TypeError:  # static arguments: a compiled program does not take them
            return self._step(*args, **kwargs)

    def _recorded(self, profiled_us: float) -> Recording:
        programs, program = programs_of(self._events), largest_program(self._events)
        if self._without_graphs is not None:
            executable = self._without_graphs.runtime_executable()
            program = executable.hlo_modules()[0].name
            programs[program] = executable
        return Recording(self._steps, self._events, self._step_us, profiled_us, program, programs)


def profile(step: Callable[..., Any], *args, steps: int = 3, warmup: int = 2, **kwargs) -> Report:
    """Where the time of `step(*args, **kwargs)` goes: calls it about ten times; see `Profiled`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxops.profiling import profile
    >>> report = profile(jax.jit(lambda x: jnp.tanh(x @ x)), jnp.ones((256, 256)))
    >>> round(report.accounted, 2)
    1.0

    If the step donates arguments, all are copied first, so yours stay valid. After each call the result's part of the
    same structure, shapes and dtypes takes a donated one's place: a step `(state, batch) -> (state, metrics)` trains
    on. Where no memory is left for the copy, wrap the step of your own loop in `Profiled`.

    Args:
      step: see `Profiled`.
      steps, warmup: see `Profiled`.

    Raises:
      ValueError: `Profiled`'s, or the result has nothing that can take a donated argument's place.
    """
    profiled, arguments = Profiled(step, steps=steps, warmup=warmup), [*args]
    lower = getattr(step, "lower", None)
    infos = jax.tree.leaves(lower(*args, **kwargs).args_info) if lower else []
    if any(info.donated for info in infos):
        arguments = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, arguments)
    while not profiled.done:
        result = profiled(*arguments, **kwargs)
        children = result.values() if isinstance(result, dict) else result if isinstance(result, (tuple, list)) else ()
        parts = [result, *children]
        for number, argument in enumerate(arguments):
            if not any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(argument)):
                continue
            place = next((i for i, part in enumerate(parts) if _kind(part) == _kind(argument)), None)
            if place is None:
                raise ValueError(
                    f"the step donates argument {number}, but nothing in its result has that argument's structure, "
                    "shapes and dtypes, to be passed to the next call. Wrap the step in jaxops.profiling.Profiled and "
                    "call that in your own loop."
                )
            arguments[number] = parts.pop(place)
    return profiled.report


def _kind(tree: Any) -> tuple:
    """Structure, shapes and dtypes, which deleted arrays have, too."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype) if hasattr(x, "dtype") else type(x) for x in leaves]
