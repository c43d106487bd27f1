"""Time of one call of a function: of its kernels on the device, or of the host's clock."""

import time
from collections.abc import Callable
from typing import Any

import jax

from jaxops.profiling import trace

_NOTHING_RAN = "no kernel ran on a GPU: there is nothing to measure."


def device_times_us(fn: Callable, *args, iterations: int = 20) -> list[float]:
    """Microseconds on the device for each of `iterations` calls of fn(*args), after a warm-up call: the sum of its
    kernels' times (CUPTI).

    The L2 is cold only where the arguments are several times larger. Do not use it under ncu or compute-sanitizer, nor
    after a `jax.profiler.trace` of your own in the same process.

    Raises:
      RuntimeError: no kernel ran (a CPU, or a result that XLA folded into a constant).
    """
    if trace.has_recorded():
        return _recorded_times_us(fn, args, iterations)
    _, times_ms = _measured(fn, iterations=iterations)(*args)
    if times_ms is None:
        raise RuntimeError(_NOTHING_RAN)
    return [1e3 * t for t in (times_ms if isinstance(times_ms, list) else [times_ms])]


def _measured(fn: Callable, **options: Any) -> Callable:
    from jax.experimental.mosaic.gpu import profiler  # a second and a half, which a training would pay at its start

    return profiler.measure(fn, **options)


def _recorded_times_us(fn: Callable, args: tuple, iterations: int) -> list[float]:
    """The same by jax.profiler, which keeps CUPTI to itself once it was used: Mosaic's profiler would abort."""
    jax.block_until_ready(fn(*args))
    with trace.recorded() as events:
        jax.block_until_ready([fn(*args) for _ in range(iterations)])
    on_gpu = jax.default_backend() == "gpu"
    times = [event.us for event in events if on_gpu and event.kind in ("kernel", "communication")]
    if not times:
        raise RuntimeError(_NOTHING_RAN)
    each = len(times) // iterations
    if each * iterations != len(times):  # a call may launch more kernels than another: only the mean is known
        return [sum(times) / iterations] * iterations
    return [sum(times[i * each : (i + 1) * each]) for i in range(iterations)]


def kernel_times_us(fn: Callable, *args) -> list[tuple[str, float]]:
    """(name, microseconds) of each kernel that a call of fn(*args) launches, in order, after a warm-up call. Without a
    GPU, none."""
    if jax.default_backend() != "gpu":
        return []
    if not trace.has_recorded():
        _, launched = _measured(fn, aggregate=False, iterations=1)(*args)
        return [(name, 1e3 * ms) for name, ms in launched or []]
    jax.block_until_ready(fn(*args))
    with trace.recorded() as events:
        jax.block_until_ready(fn(*args))
    return [(event.name, event.us) for event in events if event.kind in ("kernel", "communication")]


def wall_times_us(fn: Callable, *args, iterations: int = 20) -> list[float]:
    """Microseconds until the result of each of `iterations` calls of fn(*args) is ready, after a warm-up call: what a
    transfer takes, which has no kernel, and what a CPU takes. Includes the launch."""
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(1e6 * (time.perf_counter() - start))
    return times
