"""What this card can do: its memory, its dense products, its transfers. Measured once, and kept."""

import dataclasses
import datetime
import functools
import json
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._lib.arrays.checks import check_dtype, check_flag, type_name
from jaxops._lib.card import disturbance
from jaxops._lib.planning.cache_files import cache_folder, write_whole
from jaxops._lib.planning.device import Device, current_device, default_device
from jaxops.profiling.device_times import device_times_us, wall_times_us

_FP8 = "float8_e4m3fn"
_CUBLASLT_FP8 = "__cublas$lt$matmul$f8"


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What a card reaches with the simplest programs: nothing that a step does can be much faster.

    >>> card = Ceilings("some card", 4000.0, {"bfloat16": 800.0}, 50.0, 50.0, "0.12.0", None, "2026-11-24")
    >>> us, ceiling = card.floor(2 * 8192**3, 3 * 2 * 8192**2, "bfloat16")  # a product's FLOPs and bytes
    >>> round(us), ceiling
    (1374, 'tensor cores')

    Attributes:
      device: the card's name.
      copy_gbps: of its memory, bytes read and written.
      dense_tflops: by the operands' dtype, TFLOP/s of the best dense product.
      host_to_device_gbps, device_to_host_gbps: of one large transfer from or to pinned memory.
      jax: its version.
      driver: NVIDIA's; None if unknown.
      date: of the measurement.
    """

    device: str
    copy_gbps: float
    dense_tflops: Mapping[str, float]
    host_to_device_gbps: float
    device_to_host_gbps: float
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

    def floor(
        self, flops: float, moved_bytes: float, dtype: Any = None
    ) -> tuple[float, Literal["tensor cores", "memory"]]:
        """The least microseconds for so many FLOPs of products and bytes read and written, and the ceiling that binds.

        Args:
          flops: two a multiplication. They take no time if the products of this dtype were not measured.
          moved_bytes: of the card's memory, each input read once and each output written once.
          dtype: of the products' operands; None without products.
        """
        rate = None if dtype is None else self.product_tflops(dtype)
        products_us, memory_us = flops / (rate * 1e6) if rate else 0.0, moved_bytes / (self.copy_gbps * 1e3)
        return (products_us, "tensor cores") if products_us > memory_us else (memory_us, "memory")

    def __str__(self) -> str:
        dense = ", ".join(f"{name} {rate:,.4g} TFLOP/s" for name, rate in self.dense_tflops.items())
        return (
            f"copy {self.copy_gbps:,.4g} GB/s; products {dense}; host to device {self.host_to_device_gbps:,.4g} GB/s, "
            f"back {self.device_to_host_gbps:,.4g} GB/s"
        )


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
      The ceilings. A file that is damaged is measured again, and one that cannot be written is left out, each with a
      RuntimeWarning.

    Raises:
      TypeError: device is no device, again no bool.
      MemoryError: less than 8 GB of the card's memory are free.
      RuntimeError: CUPTI is missing, or in use by another profiler.
    """
    check_flag("again", again)
    if device is not None and not isinstance(device, jax.Device):
        raise TypeError(f"device is {type_name(device)}; write one of jax.local_devices().")
    device = default_device() if device is None else device
    with jax.default_device(device):
        facts = current_device()
        if not again and (kept := _read(facts)) is not None:
            return kept
        if 0 < (free := _free_bytes(device)) < _NEEDED_BYTES:
            raise MemoryError(
                f"{device.device_kind} has {free / 1e9:.1f} GB of free memory; measuring its ceilings needs "
                f"{_NEEDED_BYTES / 1e9:.0f} GB. Call jaxops.profiling.ceilings() in a process of its own, which keeps "
                "them for later ones."
            )
        measured = measure(device, GPU_SIZES if facts.platform == "gpu" else CPU_SIZES)
        # Now, since a card at rest runs at its full clocks.
        doubt = f"{cause}: its ceilings may be too low" if (cause := disturbance()) else ""
        try:
            if not doubt:
                write_whole(ceilings_file(facts), json.dumps(dataclasses.asdict(measured), indent=1) + "\n")
        except OSError as error:
            doubt = str(error)
    if doubt:
        warnings.warn(f"{doubt}. The ceilings are not kept.", RuntimeWarning, stacklevel=2)
    return measured


def ceilings_file(device: Device) -> pathlib.Path:
    """Where `ceilings` keeps a card's measurement."""
    return cache_folder("ceilings") / f"{device.slug}.json"


def _read(device: Device) -> Ceilings | None:
    """The measurement that is kept; None where it must be made, with a warning if there is something else."""
    try:
        kept = Ceilings(**json.loads(ceilings_file(device).read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError) as error:
        warnings.warn(f"the kept ceilings cannot be used ({error}): measured again.", RuntimeWarning, stacklevel=3)
        return None
    return kept if (kept.device, kept.jax) == (device.kind, jax.__version__) else None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What `measure` runs: bytes of the copied array, (M, K, N) of the products, bytes of the transferred array."""

    copied_bytes: int
    dense: tuple[tuple[int, int, int], ...]
    transferred_bytes: int


_NEEDED_BYTES = 8e9  # for GPU_SIZES: operands, results, and what cuBLAS' autotuning takes
_ALIVE_BYTES = 5e9  # of results, all of which CUPTI's measurement keeps
_WORK_US = 50_000  # of measured calls: enough for a median, and a GPU's clocks settle
GPU_SIZES = Sizes(1 << 30, ((8192, 8192, 8192), (16384, 4096, 14336)), 1 << 28)
CPU_SIZES = Sizes(1 << 22, ((256, 256, 256),), 1 << 22)


def measure(device: Any, sizes: Sizes) -> Ceilings:
    """`ceilings`, without its file; also where a training loop disallows transfers."""
    with jax.default_device(device), jax.transfer_guard("allow"):
        facts = current_device()
        copied, transferred = sizes.copied_bytes // 4, sizes.transferred_bytes // 4  # float32
        numbers = _normal(max(copied, transferred, *(m * k + k * n for m, k, n in sizes.dense)))
        copy_us = _median_us(jax.jit(jnp.negative), numbers[:copied])
        rates: dict[str, float] = {}
        for dtype in ("bfloat16", "float16", "float32", *((_FP8,) if facts.has((8, 9)) else ())):
            measured = [_dense_tflops(numbers, shape, dtype) for shape in sizes.dense]
            if known := [rate for rate in measured if rate is not None]:
                rates[dtype] = _rounded(max(known))
        # Compiled, as in a step: XLA then copies straight between the card's memory and the pinned one.
        to_host = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Host))
        to_device = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device))
        x = numbers[:transferred]
        host_us, device_us = _median_us(to_host, x, wall=True), _median_us(to_device, to_host(x), wall=True)
        version = pathlib.Path("/sys/module/nvidia/version")
        return Ceilings(
            device=facts.kind,
            copy_gbps=_rounded(2 * sizes.copied_bytes / copy_us / 1e3),
            dense_tflops=rates,
            host_to_device_gbps=_rounded(sizes.transferred_bytes / device_us / 1e3),
            device_to_host_gbps=_rounded(sizes.transferred_bytes / host_us / 1e3),
            jax=jax.__version__,
            driver=version.read_text("utf-8").strip() if version.is_file() else None,
            date=datetime.date.today().isoformat(),
        )


def _dense_tflops(numbers: jax.Array, shape: tuple[int, int, int], dtype: str) -> float | None:
    """Of the first numbers times the last ones. None where FP8 is not multiplied by cuBLASLt: XLA then widens the
    operands."""
    (m, k, n), fp8 = shape, dtype == _FP8  # which cuBLASLt multiplies as x [M, K] @ w [N, K].T
    x = numbers[: m * k].reshape(m, k).astype(dtype)
    w = numbers[-k * n :].reshape((n, k) if fp8 else (k, n)).astype(dtype)
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1 if fp8 else 0,)), ((), ())),
        precision=lax.Precision.DEFAULT,  # whatever jax_default_matmul_precision says
        preferred_element_type=jnp.dtype("bfloat16" if fp8 else dtype),
    )
    # cuBLAS only, as in the benchmarks' dense rates: XLA would otherwise autotune its own Triton GEMMs, too.
    compiled = jax.jit(product).lower(x, w).compile({"xla_gpu_enable_triton_gemm": False})
    if fp8 and _CUBLASLT_FP8 not in (compiled.as_text() or ""):
        return None
    return 2 * m * k * n / _median_us(compiled, x, w) / 1e6


@functools.partial(jax.jit, static_argnums=0)
def _normal(count: int) -> jax.Array:
    """Random normal float32 [count]: zeros would draw less power and run at higher clocks. The first 64 MB are
    repeated, since the bits of random numbers take several times their memory."""
    return jnp.resize(jax.random.normal(jax.random.key(0), (min(count, 1 << 24),), jnp.float32), (count,))


def _median_us(call: Callable, *args: jax.Array, wall: bool = False) -> float:
    """The median time of a call's kernels; with wall, or where there is no GPU, of the call."""
    times_us = wall_times_us if wall or current_device().platform != "gpu" else device_times_us
    once_us = wall_times_us(call, *args, iterations=1)[0]
    calls = min(50, _ALIVE_BYTES / call(*args).nbytes, max(3.0, _WORK_US / max(once_us, 1.0)))
    return max(float(np.median(times_us(call, *args, iterations=max(1, int(calls))))), 1e-3)


def _rounded(rate: float) -> float:
    """Four digits: the next ones differ from run to run."""
    return float(f"{rate:.4g}")


def _free_bytes(device: Any) -> int:
    """Of the device's memory; 0 if unknown, as on a CPU."""
    stats = device.memory_stats() or {}
    return max(1, stats["bytes_limit"] - stats["bytes_in_use"]) if "bytes_limit" in stats else 0
