"""How the machine's rates are measured: random operands, times of kernels and of transfers, the device's facts."""

import datetime
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._lib.arrays.checks import type_name
from jaxops._lib.planning.device import Device, current_device, default_device, host_device
from jaxops.profiling.device_times import device_times_us, wall_times_us

_WORK_US = 50_000  # of measured calls: enough for a median, and a GPU's clocks settle
_LEAST_CALLS, _MOST_CALLS = 3, 50
_CHUNK = 1 << 24  # random numbers made at a time: their bits take several times the memory

Transfer = tuple[Callable[[jax.Array], jax.Array], jax.Array]  # and its operand


@functools.partial(jax.jit, static_argnums=0)
def normal(count: int) -> jax.Array:
    """Random normal float32 [count]. Zeros would draw less power and run at higher clocks."""
    chunk = min(count, _CHUNK)
    keys = jax.random.split(jax.random.key(0), -(-count // chunk))
    return lax.map(lambda key: jax.random.normal(key, (chunk,), jnp.float32), keys).reshape(-1)[:count]


def kernel_us(call: Callable, args: tuple, result_bytes: int, device: Any) -> float:
    """The median time of a call's kernels; where there is no GPU, of the call."""
    room = free_bytes(device) // 4 or math.inf  # CUPTI's measurement keeps the results of all its calls
    most = max(1, int(min(_MOST_CALLS, room // max(result_bytes, 1) - 1)))
    return _median_us(device_times_us if is_gpu(device) else wall_times_us, call, args, most)


def wall_us(call: Callable, *args: Any) -> float:
    """The median time until a call's result is ready."""
    return _median_us(wall_times_us, call, args, _MOST_CALLS)


def _median_us(times: Callable[..., list[float]], call: Callable, args: tuple, most: int) -> float:
    once = wall_times_us(call, *args, iterations=1)[0]
    calls = min(most, max(_LEAST_CALLS, round(_WORK_US / max(once, 1.0))))
    return max(float(np.median(times(call, *args, iterations=calls))), 1e-3)


def host_links(device: Any, x: jax.Array) -> tuple[str, Transfer, Transfer]:
    """The kind of host memory, "pinned" or "pageable", and x's transfers from it to the device and back.

    Args:
      x: on the device.
    """
    if any(memory.kind == "pinned_host" for memory in device.addressable_memories()):
        # Compiled, as in a step: XLA then copies straight between the card's memory and the pinned one.
        to_host = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Host))
        to_device = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device))
        return "pinned", (to_device, to_host(x)), (to_host, x)
    host = host_device()
    return "pageable", (to_other(device), jax.device_put(x, host)), (to_other(host), x)


def to_other(device: Any) -> Callable[[jax.Array], jax.Array]:
    """A transfer to the device."""
    return lambda x: jax.device_put(x, device)


def rounded(rate: float) -> float:
    """Four digits: the next ones differ from run to run."""
    return float(f"{rate:.4g}")


def checked_device(device: Any) -> Any:
    """The device, or JAX's default device for None.

    Raises:
      TypeError: something else.
    """
    if device is not None and not isinstance(device, jax.Device):
        raise TypeError(f"device is {type_name(device)}; write one of jax.local_devices().")
    return default_device() if device is None else device


def facts_of(device: Any) -> Device:
    with jax.default_device(device):
        return current_device()


def is_gpu(device: Any) -> bool:
    return facts_of(device).platform == "gpu"


def free_bytes(device: Any) -> int:
    """Of the device's memory; 0 if unknown, as on a CPU."""
    stats = device.memory_stats() or {}
    return max(1, stats["bytes_limit"] - stats["bytes_in_use"]) if "bytes_limit" in stats else 0


def made() -> dict[str, Any]:
    """Versions of JAX and of NVIDIA's driver (None if unknown), and the date."""
    version = pathlib.Path("/sys/module/nvidia/version")
    driver = version.read_text("utf-8").strip() if version.is_file() else None
    return {"jax": jax.__version__, "driver": driver, "date": datetime.date.today().isoformat()}
