"""A run's programs, compiled side by side before they are called."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import typer
from jax.extend.core import Var, jaxprs_in_params

AT_ONCE = 2  # the step, and beside it the others in turn: they would only delay it
KERNELS = ("triton_kernel_call", "pallas_call")


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """While jaxprs and IR grow: Python would search all objects for cycles again and again, 0.8 of the 4.7 s that a CPU
    needs for the step of `lm --preset 3b`."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class Compiling:
    """Compiles programs in threads. JAX keeps each with its jitted function, whose first call finds it.

    Programs of the run are traced and lowered in the caller's thread: there JAX's settings are the run's, errors have
    the usual traceback, and Ctrl-C ends it. XLA needs no GIL. A context manager, which waits for what it has started
    unless an error or a signal ends it.

    Args:
      limit: bytes of the device that the programs have.
    """

    def __init__(self, limit: float = math.inf):
        self._limit = limit
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="compile")
        self._programs: dict[str, Future] = {}
        self._kernels: dict[str, str] = {}  # a part of a line
        self._began = time.perf_counter()

    def __enter__(self) -> "Compiling":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=error is None, cancel_futures=error is not None)

    def run(self, function: Callable[[], Any]) -> Future:
        """Calls it in a thread."""
        return self._pool.submit(function)

    @_no_garbage_collection()
    def start(self, name: str, function: Any, *args: Any) -> None:
        """Begins to compile a jitted function for arguments or their shapes. Others compile at their first call.

        Raises:
          typer.BadParameter: it needs more memory than there is, whatever XLA does.
        """
        if not hasattr(function, "trace"):
            return
        traced = function.trace(*args)
        given, stacks = least_bytes(traced.jaxpr.jaxpr)
        if given + stacks > self._limit:
            whole, given, stacks, limit = (f"{x / 1e9:.1f}" for x in (given + stacks, given, stacks, self._limit))
            raise typer.BadParameter(
                f"{name} needs more than {whole} GB, {given} of arrays and {stacks} of what its scan over layers "
                f"stacks; the device has {limit}. Unroll the layers (unroll: true), recompute them (policy: {{}}), or "
                "take a smaller batch."
            )
        kernels = len(set(_kernels(traced.jaxpr.jaxpr, set())))
        self._kernels[name] = f"{kernels} kernels, " if kernels else ""
        lowered = traced.lower()
        self._programs[name] = self._pool.submit(lambda: (lowered.compile(), self._seconds())[1])

    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def wait(self, name: str, show: Callable[[str], None]) -> float | None:
        """Waits for a program, and raises its compiler's error. Returns the seconds from the run's begin until it was
        compiled; None if it was not started, or was waited for.

        Args:
          show: called with a line each second.
        """
        program = self._programs.pop(name, None)
        while program is not None and not wait([program], timeout=1).done:
            show(f"compiling {name}: {self._kernels[name]}{self._seconds():.0f} s")
        return None if program is None else program.result()


def least_bytes(jaxpr: Any) -> tuple[int, int]:
    """Bytes of a program's arguments, and of the stacks that are there at a time while it scans over layers.

    A backward loop reads what a forward loop has stacked, and stacks the gradients: all of that is there until it ends.
    """
    size = lambda vars: sum(math.prod(v.aval.shape) * getattr(v.aval.dtype, "itemsize", 0) for v in vars)
    most, stacked = 0, set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            read = [v for v in equation.invars if isinstance(v, Var) and v in stacked]
            own = [v for v in equation.outvars if v.aval.shape[:1] == (equation.params["length"],)]
            most = max(most, size(set(read)) + size(own))
            stacked.update(own)
    return size(jaxpr.invars), most


def _kernels(jaxpr: Any, seen: set[int]) -> Iterator[tuple]:
    """Each call of a kernel, equal for equal kernels. Layers share what they call."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for equation in jaxpr.eqns:
        if equation.primitive.name in KERNELS:
            types = tuple(str(v.aval) for v in (*equation.invars, *equation.outvars))
            yield *map(equation.params.get, ("name", "fn", "metaparams")), types
        for inner in jaxprs_in_params(equation.params):
            yield from _kernels(inner, seen)
