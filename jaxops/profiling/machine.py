"""What this card can do: its memory, its dense products, its transfers. Measured once, and kept."""

import dataclasses
import datetime
import functools
import json
import math
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._lib.arrays.checks import check_dtype, check_flag, check_number, type_name
from jaxops._lib.card import disturbance
from jaxops._lib.planning.cache_files import cache_folder, write_whole
from jaxops._lib.planning.device import Device, current_device, default_device, host_device
from jaxops.profiling.device_times import device_times_us, wall_times_us

_FP8 = "float8_e4m3fn"
_CUBLASLT_FP8 = "__cublas$lt$matmul$f8"


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What a card reaches with the simplest programs: nothing that a step does can be much faster.

    >>> card = Ceilings("some card", 4000.0, {"bfloat16": 800.0}, 50.0, 50.0, "pinned", "0.12.0", None, "2026-11-24")
    >>> round(card.least_us(2 * 8192**3, 3 * 2 * 8192**2, "bfloat16"))  # a product's FLOPs and bytes
    1374

    Attributes:
      device: the card's name.
      copy_gbps: of its memory, bytes read and written.
      dense_tflops: by the operands' dtype, TFLOP/s of the best dense product.
      host_to_device_gbps, device_to_host_gbps: of one large transfer.
      host_memory: of these transfers, "pinned" or "pageable".
      jax: its version.
      driver: NVIDIA's; None if unknown.
      date: of the measurement.
    """

    device: str
    copy_gbps: float
    dense_tflops: Mapping[str, float]
    host_to_device_gbps: float
    device_to_host_gbps: float
    host_memory: str
    jax: str
    driver: str | None
    date: str

    def product_tflops(self, dtype: Any) -> float | None:
        """TFLOP/s of the best dense product of operands of this dtype; None if it was not measured. Tensor cores
        multiply float8_e5m2 as fast as float8_e4m3fn, so it has that rate.

        Raises:
          TypeError: no dtype.
        """
        name = check_dtype("dtype", dtype).name
        return self.dense_tflops.get(_FP8 if name == "float8_e5m2" else name)

    def least_us(self, flops: float, moved_bytes: float, dtype: Any) -> float:
        """The least microseconds for so many FLOPs of products and bytes read and written: at the ceiling that binds.

        Args:
          flops: two a multiplication; 0 for no products.
          moved_bytes: of the card's memory, each input read once and each output written once.
          dtype: of the products' operands; any if flops is 0.

        Raises:
          ValueError: a number is negative, or products of this dtype were not measured. TypeError: no numbers.
        """
        check_number("flops", flops, 0)
        memory_us = check_number("moved_bytes", moved_bytes, 0) / (self.copy_gbps * 1e3)
        if not flops:
            return memory_us
        rate = self.product_tflops(dtype)
        if rate is None:
            known = ", ".join(self.dense_tflops)
            raise ValueError(f"dtype={check_dtype('dtype', dtype).name}: its products were not measured, only {known}.")
        return max(flops / (rate * 1e6), memory_us)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return vars(self) | {"dense_tflops": dict(self.dense_tflops)}

    @classmethod
    def from_dict(cls, fields: Any) -> "Ceilings":
        """From `to_dict`'s.

        Raises:
          ValueError: fields are missing, unknown or no rates.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or set(fields) != names or not isinstance(fields["dense_tflops"], dict):
            raise ValueError(f"these are no ceilings: they have the fields {', '.join(sorted(names))}.")
        rates = [fields[name] for name in names if name.endswith("_gbps")] + [*fields["dense_tflops"].values()]
        if not all(type(rate) in (int, float) and 0 < rate < math.inf for rate in rates):
            raise ValueError(f"these are no ceilings: rates are positive numbers, not {rates}.")
        return cls(**fields)


def ceilings(device: Any = None, *, again: bool = False) -> Ceilings:
    """What this card can do. Measured once, which takes some seconds, and kept in jaxops' cache directory.

    Measured again by another version of JAX, whose cuBLAS may be faster or slower. Measure while nothing else runs on
    the card, best in a process of its own: `again=True` replaces numbers that are too low. While other processes run on
    the card, or heat or its power supply lowers its clocks, the numbers are returned with a RuntimeWarning and not
    kept.

    On a GPU these are times of kernels (CUPTI): of `-x` for the memory, since a plain copy may have no kernel, and of
    `x @ w` by cuBLAS on random normal data, square and wide, for bfloat16, float16, float32 (as JAX multiplies it by
    default: TF32) and, where cuBLASLt has it, float8_e4m3fn with a bfloat16 result. Transfers are wall time. On a CPU
    everything is wall time at small sizes, which only shows that it runs.

    >>> from jaxops import profiling
    >>> profiling.ceilings(again=True).dense_tflops  # doctest: +SKIP

    Args:
      device: one of this process's `jax.local_devices()`; by default JAX's default device.
      again: measure also if there is a measurement.

    Returns:
      The ceilings. A file that is damaged or of another card is measured again, and one that cannot be written is left
      out, each with a RuntimeWarning.

    Raises:
      TypeError: device is no device, again no bool.
      MemoryError: less than 6 GB of the card's memory are free.
      RuntimeError: CUPTI is missing, or in use by another profiler.
    """
    check_flag("again", again)
    device = _checked_device(device)
    try:
        file = ceilings_file(_facts_of(device))
    except OSError as error:
        file = None
        warnings.warn(f"the ceilings are not kept: {error}", RuntimeWarning, stacklevel=2)
    if not again and file is not None and (found := _read(file, device.device_kind)) is not None:
        return found
    if 0 < (free := _free_bytes(device)) < _NEEDED_BYTES:
        raise MemoryError(
            f"{device.device_kind} has {free / 1e9:.1f} GB of free memory; measuring its ceilings needs "
            f"{_NEEDED_BYTES / 1e9:.0f} GB. Call jaxops.profiling.ceilings() in a process of its own: later ones read "
            f"them from {file or 'its file'}."
        )
    found = measure(device, GPU_SIZES if _is_gpu(device) else CPU_SIZES)
    with jax.default_device(device):
        disturbed = disturbance()  # now, since a card at rest runs at its full clocks
    if disturbed:
        warnings.warn(f"{disturbed}: its ceilings may be too low and are not kept.", RuntimeWarning, stacklevel=2)
        return found
    if file is None:
        return found
    try:
        write_whole(file, json.dumps(found.to_dict(), indent=1) + "\n")
    except OSError as error:
        warnings.warn(f"the ceilings are not kept: {error}", RuntimeWarning, stacklevel=2)
    return found


def ceilings_file(device: Device) -> pathlib.Path:
    """Where `ceilings` keeps a card's measurement."""
    return cache_folder("ceilings") / f"{device.slug}.json"


def _read(file: pathlib.Path, kind: str) -> Ceilings | None:
    """The measurement in a file; None where it must be made, with a warning if there is something else."""
    try:
        found = Ceilings.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.warn(f"{file} cannot be used ({error}): measured again.", RuntimeWarning, stacklevel=3)
        return None
    if found.device != kind:
        warnings.warn(f"{file} is of {found.device}, this is {kind}: measured again.", RuntimeWarning, stacklevel=3)
        return None
    return found if found.jax == jax.__version__ else None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What `measure` runs: bytes of the copied array, (M, K, N) of the products, bytes of the transferred array."""

    copied_bytes: int
    dense: tuple[tuple[int, int, int], ...]
    transferred_bytes: int


_NEEDED_BYTES = 6e9  # for GPU_SIZES: operands, two results, and what cuBLAS' autotuning takes
GPU_SIZES = Sizes(1 << 30, ((8192, 8192, 8192), (16384, 4096, 14336)), 1 << 28)
CPU_SIZES = Sizes(1 << 22, ((256, 256, 256),), 1 << 22)


def measure(device: Any, sizes: Sizes) -> Ceilings:
    """`ceilings`, without its file."""
    with jax.default_device(device):
        facts = _facts_of(device)
        copied, transferred = sizes.copied_bytes // 4, sizes.transferred_bytes // 4  # float32
        numbers = _normal(max(copied, transferred, *(m * k + k * n for m, k, n in sizes.dense)))
        copy_us = _kernel_us(jax.jit(jnp.negative), (numbers[:copied],), sizes.copied_bytes, device)
        rates: dict[str, float] = {}
        for dtype in ("bfloat16", "float16", "float32", *((_FP8,) if facts.has((8, 9)) else ())):
            found = [_dense_tflops(numbers, shape, dtype, device) for shape in sizes.dense]
            if known := [rate for rate in found if rate is not None]:
                rates[dtype] = _rounded(max(known))
        memory, *links = _host_links(device, numbers[:transferred])
        there, back = (_rounded(sizes.transferred_bytes / _wall_us(*link) / 1e3) for link in links)
        copy_gbps = _rounded(2 * sizes.copied_bytes / copy_us / 1e3)
        return Ceilings(facts.kind, copy_gbps, rates, there, back, memory, **_made())


def _dense_tflops(numbers: jax.Array, shape: tuple[int, int, int], dtype: str, device: Any) -> float | None:
    """None where FP8 is not multiplied by cuBLASLt: XLA then widens the operands."""
    m, k, n = shape
    fp8 = dtype == _FP8
    x, w = _operands(numbers, shape, dtype)
    # cuBLAS only, as in the benchmarks' dense rates: XLA would otherwise autotune its own Triton GEMMs, too.
    compiled = jax.jit(_fp8_product if fp8 else _product).lower(x, w).compile({"xla_gpu_enable_triton_gemm": False})
    if fp8 and _CUBLASLT_FP8 not in (compiled.as_text() or ""):
        return None
    return 2 * m * k * n / _kernel_us(compiled, (x, w), m * n * (2 if fp8 else x.dtype.itemsize), device) / 1e6


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w, precision=lax.Precision.DEFAULT)  # whatever jax_default_matmul_precision says


def _fp8_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [M, K] @ w [N, K].T: the form that cuBLASLt supports."""
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=lax.Precision.DEFAULT, preferred_element_type=jnp.bfloat16
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _operands(numbers: jax.Array, shape: tuple[int, int, int], dtype: str) -> tuple[jax.Array, jax.Array]:
    """x [M, K] and w [K, N], or [N, K] for FP8, of the first and the last of the numbers."""
    m, k, n = shape
    x, w = numbers[: m * k].reshape(m, k), numbers[-k * n :].reshape((n, k) if dtype == _FP8 else (k, n))
    return x.astype(dtype), w.astype(dtype)


_WORK_US = 50_000  # of measured calls: enough for a median, and a GPU's clocks settle
_LEAST_CALLS, _MOST_CALLS = 3, 50
_CHUNK = 1 << 24  # random numbers made at a time: their bits take several times the memory

Transfer = tuple[Callable[[jax.Array], jax.Array], jax.Array]  # and its operand


@functools.partial(jax.jit, static_argnums=0)
def _normal(count: int) -> jax.Array:
    """Random normal float32 [count]. Zeros would draw less power and run at higher clocks."""
    chunk = min(count, _CHUNK)
    keys = jax.random.split(jax.random.key(0), -(-count // chunk))
    return lax.map(lambda key: jax.random.normal(key, (chunk,), jnp.float32), keys).reshape(-1)[:count]


def _kernel_us(call: Callable, args: tuple, result_bytes: int, device: Any) -> float:
    """The median time of a call's kernels; where there is no GPU, of the call."""
    room = _free_bytes(device) // 4 or math.inf  # CUPTI's measurement keeps the results of all its calls
    most = max(1, int(min(_MOST_CALLS, room // max(result_bytes, 1) - 1)))
    return _median_us(device_times_us if _is_gpu(device) else wall_times_us, call, args, most)


def _wall_us(call: Callable, *args: Any) -> float:
    """The median time until a call's result is ready."""
    return _median_us(wall_times_us, call, args, _MOST_CALLS)


def _median_us(times: Callable[..., list[float]], call: Callable, args: tuple, most: int) -> float:
    once = wall_times_us(call, *args, iterations=1)[0]
    calls = min(most, max(_LEAST_CALLS, round(_WORK_US / max(once, 1.0))))
    return max(float(np.median(times(call, *args, iterations=calls))), 1e-3)


def _host_links(device: Any, x: jax.Array) -> tuple[str, Transfer, Transfer]:
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
    return "pageable", (_to_other(device), jax.device_put(x, host)), (_to_other(host), x)


def _to_other(device: Any) -> Callable[[jax.Array], jax.Array]:
    """A transfer to the device."""
    return lambda x: jax.device_put(x, device)


def _rounded(rate: float) -> float:
    """Four digits: the next ones differ from run to run."""
    return float(f"{rate:.4g}")


def _checked_device(device: Any) -> Any:
    """The device, or JAX's default device for None.

    Raises:
      TypeError: something else.
    """
    if device is not None and not isinstance(device, jax.Device):
        raise TypeError(f"device is {type_name(device)}; write one of jax.local_devices().")
    return default_device() if device is None else device


def _facts_of(device: Any) -> Device:
    with jax.default_device(device):
        return current_device()


def _is_gpu(device: Any) -> bool:
    return _facts_of(device).platform == "gpu"


def _free_bytes(device: Any) -> int:
    """Of the device's memory; 0 if unknown, as on a CPU."""
    stats = device.memory_stats() or {}
    return max(1, stats["bytes_limit"] - stats["bytes_in_use"]) if "bytes_limit" in stats else 0


def _made() -> dict[str, Any]:
    """Versions of JAX and of NVIDIA's driver (None if unknown), and the date."""
    version = pathlib.Path("/sys/module/nvidia/version")
    driver = version.read_text("utf-8").strip() if version.is_file() else None
    return {"jax": jax.__version__, "driver": driver, "date": datetime.date.today().isoformat()}
