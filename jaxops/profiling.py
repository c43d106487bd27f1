"""Device time of jitted functions, without that of the host."""

from collections.abc import Callable

from jax.experimental.mosaic.gpu import profiler


def device_times_us(fn: Callable, *args, iterations: int = 20) -> list[float]:
    """Microseconds on the device for each of `iterations` calls of fn(*args), after a warm-up call: the sum of its
    kernels' times (CUPTI).

    The L2 is cold only where the arguments are several times larger. Do not use it under ncu or compute-sanitizer.

    Raises:
      RuntimeError: no kernel ran (a CPU, or a result that XLA folded into a constant).
    """
    _, times_ms = profiler.measure(fn, iterations=iterations)(*args)
    if times_ms is None:
        raise RuntimeError("no kernel ran on a GPU: there is nothing to measure.")
    return [1e3 * t for t in (times_ms if isinstance(times_ms, list) else [times_ms])]
