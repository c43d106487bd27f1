"""Profiles a step of another Python program, which runs unchanged and knows nothing of it."""

import _thread
import collections
import dataclasses
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxops._lib.python_program import ProgramError, run_program
from jaxops.profiling import trace
from jaxops.profiling.building import Recording, build, largest_program, programs_of
from jaxops.profiling.machine import ceilings
from jaxops.profiling.report import Report
from jaxops.profiling.scopes import own_metadata
from jaxops.profiling.trace import Event, Launch

_COMPILED = "/jax/core/compile/backend_compile_duration"
_SETTLED_S, _FIRST_S, _LONGEST_S = 0.5, 1.0, 60.0


class _Recorder(threading.Thread):
    """Records the running program, longer each time, until there are enough steps between two compilations.

    Attributes:
      recording: the result; None until there is one.
      ended: to be set when the program has ended.
    """

    def __init__(self, function: str, steps: int, stop: bool):
        super().__init__(daemon=True)
        self.recording: Recording | None = None
        self.error: Exception | None = None
        self.launched: collections.Counter[str] = collections.Counter()
        self.ended = threading.Event()
        self._function, self._steps, self._stop_program = function, steps, stop
        self._last_compiled = 0.0  # the backend exists from the first compilation on
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            self._last_compiled = time.monotonic()

    def run(self) -> None:
        try:
            seconds = _FIRST_S
            while self.recording is None and not self.ended.is_set():
                if self._last_compiled and time.monotonic() - self._last_compiled > _SETTLED_S:
                    self._record(seconds)
                    seconds = min(2 * seconds, _LONGEST_S)
                self.ended.wait(0.05)
        except Exception as error:  # raised where the program ended
            self.error = error
        if self.recording is not None and self._stop_program and not self.ended.is_set():
            _thread.interrupt_main()

    def _record(self, seconds: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with trace.recording(folder):
                self.ended.wait(seconds)
            events, launches = trace.read(folder)
        self.launched.update(launch.name for launch in launches if not launch.is_annotation)
        if recording := steps_in(events, launches, self._steps, self._function):
            self.recording = dataclasses.replace(recording, programs=programs_of(recording.events))


def steps_in(events: Sequence[Event], launches: Sequence[Launch], steps: int, function: str = "") -> Recording | None:
    """The last steps of a recording, from one launch of an operation to that some steps later; None if it has too few.

    A step lasts from one `jax.profiler.StepTraceAnnotation` to the next. Without them it lasts from one call of the
    jitted function to the next: of that whose program takes most of the time, or that is called `function`.
    """
    program = _module(function) if function else largest_program(events)
    own = [event for event in events if _plain(event.program) == _plain(program)]
    annotated = sum(launch.is_annotation for launch in launches)
    calls = annotated or sum(_plain(_module(launch.name)) == _plain(program) for launch in launches)
    starts: dict[tuple[int, str], list[float]] = collections.defaultdict(list)
    for event in own:
        starts[event.device, event.op or event.name].append(event.start_us)
    # What runs once a step marks it. A recording can begin or end between a call and what it runs.
    once = [each for each in starts.values() if abs(len(each) - calls) <= 1 and len(each) > steps]
    if not once:
        return None
    marks = min(once, key=lambda each: (abs(len(each) - calls), each[0]))[-steps - 1 :]
    inside = [event for event in events if marks[0] <= event.start_us < marks[-1]]
    us = (marks[-1] - marks[0]) / steps
    return Recording(steps, inside, us, us, own[0].program)


def _module(function: str) -> str:
    return f"jit_{function}"


def _plain(name: str) -> str:
    """XLA replaces what is no letter in a function's name."""
    return re.sub(r"\W+", "_", name).strip("_")


def profile_program(
    words: Sequence[str], *, function: str = "", steps: int = 3, stop: bool = False, say: Callable[[str], Any] = print
) -> Report:
    """Runs a Python program in this process and profiles its step, seen from outside: nothing of it is replaced.

    Args:
      words: `[python] -m MODULE ...` or `[python] FILE.py ...`.
      function: name of the jitted step; by default see `steps_in`.
      steps: recorded.
      stop: end the program, as Ctrl-C does, when its step is recorded.
      say: gets a line about the function, and one about how the program ended.

    Raises:
      ProgramError: other words; or the program made too few calls of a jitted function.
    """
    recorder = _Recorder(function, steps, stop)
    recorder.start()
    before = signal.getsignal(signal.SIGINT)
    try:
        if stop:  # a shell starts a job in the background with SIGINT ignored
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with own_metadata():
            run_program(words)
    except KeyboardInterrupt:
        if recorder.recording is None:
            raise
    except SystemExit as ended:
        if ended.code not in (None, 0):
            say(f"The program ended with status {ended.code}.")
    except Exception as error:
        if recorder.recording is None:
            raise
        say(f"The program failed after its step was recorded: {type(error).__name__}: {error}")
    finally:
        recorder.ended.set()
        recorder.join()
        if stop:
            signal.signal(signal.SIGINT, before)
    if recorder.error is not None:
        raise ProgramError(f"the program could not be recorded: {recorder.error}") from recorder.error
    if recorder.recording is None:
        called = ", ".join(f"{name} {count} times" for name, count in recorder.launched.items()) or "none"
        raise ProgramError(
            f"no recording has {steps + 1} calls of a jitted function{f' called {function!r}' if function else ''}: "
            f"let the program run longer. Recorded calls: {called}."
        )
    say(f"profiled {recorder.recording.program}; recorded calls of jitted functions: {dict(recorder.launched)}")
    try:
        known = ceilings()
    except (MemoryError, RuntimeError) as error:
        say(f"The card's ceilings are unknown: {error}")
        known = None
    return build(recorder.recording, known)
