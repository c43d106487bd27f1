"""Device time of jitted functions, without the host's noise."""

from collections.abc import Callable

from jax.experimental.mosaic.gpu import profiler


def device_times_us(fn: Callable, *args, iterations: int = 20) -> list[float]:
    """Microseconds on the device for each of `iterations` calls of fn(*args): the sum of its kernels' times (CUPTI), after one call to warm up.

    The caches are cold only where the arguments are several times larger than the L2. Not together with ncu or compute-sanitizer.

    Raises:
      RuntimeError: no kernel ran (a CPU, or a result that XLA folded into a constant).
    """
    _, times_ms = profiler.measure(fn, iterations=iterations)(*args)
    if times_ms is None:
        raise RuntimeError("no kernel ran on a GPU: there is nothing to measure.")
    return [1e3 * t for t in (times_ms if isinstance(times_ms, list) else [times_ms])]
