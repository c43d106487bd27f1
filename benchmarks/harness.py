"""What every benchmark shares: interleaved device times, the machine's two ceilings, and the rows that are written."""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import subprocess
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.experimental.mosaic.gpu import profiler

from jaxops.profiling import device_times_us

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORK_US = 30_000  # of measured work a variant and round: enough to average, short enough for the card to stay as warm as its neighbours leave it
ALIVE_BYTES = 25e9  # results that may be alive at a time; CUPTI's measurement keeps those of all its iterations
ROW_KEYS = (
    *(
        "op",
        "pass",
        "name",
        "shape",
        "dtype",
        "dist",
        "backend",
        "us_p50",
        "us_p20",
        "us_p80",
        "of_ceiling",
        "vs",
        "max_err",
    ),
    *("jax", "triton", "driver", "device", "commit", "date"),
)


@dataclasses.dataclass(frozen=True)
class Times:
    """Percentiles over all calls of all rounds, in microseconds."""

    us_p20: float
    us_p50: float
    us_p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Times":
        return cls(*(float(p) for p in np.percentile(np.asarray(samples), (20, 50, 80))))


@dataclasses.dataclass(frozen=True)
class Variant:
    """One side of a comparison.

    Attributes:
      name: its name in rows.
      times_us: n -> the device time of each of n calls.
      iterations: calls a round.
    """

    name: str
    times_us: Callable[[int], list[float]]
    iterations: int = 3


@dataclasses.dataclass
class Ready:
    """A side that gave the right result, with how to time it.

    Attributes:
      variant: what `interleave` calls.
      max_err: of the check, None where there was none.
      facts: what its rows say beside the times: launches, compile_s, recipe.
    """

    variant: Variant
    max_err: float | None
    facts: dict


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the machine reaches in this run: copy bandwidth (bytes read + written) and the best dense cuBLAS rate of the dtype."""

    copy_gbps: float
    dense_tflops: float

    def least_us(self, flops: float, moved_bytes: float) -> float:
        """The time that the ceiling which binds allows."""
        return max(flops / (self.dense_tflops * 1e6), moved_bytes / (self.copy_gbps * 1e3))


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def leave_room_for_torch() -> None:
    """To be called before JAX's backend starts: torch's process shares the card."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.72")


def call_times_us(fn: Callable, *args, iterations: int) -> list[float]:
    """Device time of each call on a GPU; elsewhere, where only the code path is of interest, wall time."""
    if on_gpu():
        return device_times_us(fn, *args, iterations=iterations)
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(1e6 * (time.perf_counter() - start))
    return times


def kernels(fn: Callable, *args) -> list[tuple[str, float]]:
    """(name, microseconds) of each kernel that one call launches; empty without a GPU."""
    if not on_gpu():
        return []
    _, launched = profiler.measure(fn, aggregate=False, iterations=1)(*args)
    return [(name, 1e3 * ms) for name, ms in launched or []]


def compile_fits(fn: Callable, *args, cublas: bool = False) -> tuple[Callable, float]:
    """(fn compiled for args, seconds that took). With cublas, XLA's own Triton GEMMs are out of the choice for `x @ w`.

    Raises:
      MemoryError: its temporaries and result exceed what the device has left: said here, before the allocator retries for ten seconds.
    """
    start = time.perf_counter()
    compiled = jax.jit(fn).lower(*args).compile({"xla_gpu_enable_triton_gemm": False} if cublas else None)
    seconds = time.perf_counter() - start
    needed = compiled.memory_analysis()
    stats = jax.devices()[0].memory_stats() or {}
    if needed is not None and "bytes_limit" in stats:
        need, left = (
            needed.temp_size_in_bytes + needed.output_size_in_bytes,
            stats["bytes_limit"] - stats["bytes_in_use"],
        )
        if need > left:
            raise MemoryError(f"needs {need / 1e9:.1f} GB of temporaries and results, {left / 1e9:.1f} GB are left")
    return compiled, seconds


def ready(side: str, compiled: Callable, args: tuple, out_bytes: int, max_err: float | None) -> Ready:
    """A compiled JAX side whose result is right: asks how long a call takes and what it launches."""
    launched = kernels(compiled, *args)
    us = sum(us for _, us in launched) if launched else WORK_US / 3
    return Ready(
        Variant(side, functools.partial(_times, compiled, args), iterations_for(us, out_bytes)),
        max_err,
        {"launches": len(launched)} if launched else {},
    )


def iterations_for(us: float, out_bytes: int) -> int:
    """Calls a round: about WORK_US of work, at least 3 (1 of a call that takes over 100 ms), their results together at most ALIVE_BYTES."""
    wanted = 1 if us > 1e5 else min(50, max(3, round(WORK_US / max(us, 1.0))))
    return max(
        1, min(wanted, int(ALIVE_BYTES / max(out_bytes, 1)) - 1)
    )  # the warm-up's result may still be alive beside them


def interleave(variants: Sequence[Variant], rounds: int = 5) -> dict[str, Times]:
    """Times variants in turn, round by round, each round in another random order: what drifts (clocks, heat) drifts for all.

    The order counts: the card lowers its clocks within milliseconds under a hot kernel, and whoever runs next pays for it.
    A variant that raises is left out, with its reason printed.
    """
    samples: dict[str, list[float]] = {variant.name: [] for variant in variants}
    failed: set[str] = set()
    order = np.random.default_rng(0)
    for _ in range(rounds):
        for variant in (variants[i] for i in order.permutation(len(variants))):
            if variant.name not in failed:
                try:
                    samples[variant.name] += variant.times_us(variant.iterations)
                except Exception as error:  # a peer's failure is a finding about the peer, not the end of the run
                    failed.add(variant.name)
                    print_left_out(variant.name, error)
    return {name: Times.of(times) for name, times in samples.items() if times and name not in failed}


@dataclasses.dataclass(kw_only=True)
class Run:
    """What stays the same from case to case. ceiling is the copy bandwidth in GB/s or the dense rate in TFLOP/s; left_out counts what jaxops itself could not
    do."""

    file: pathlib.Path
    rounds: int
    ceiling: float
    peers: list[str]
    left_out: int = 0

    def ready_sides(self, own: str, label: str, make: Callable[..., Ready], *args) -> dict[str, Ready]:
        """Those of own and the peers that `make(name, *args)` gets ready; it raises for the others, which are said."""
        found: dict[str, Ready] = {}
        for name in (own, *self.peers):
            try:
                found[name] = make(name, *args)
            except Exception as error:
                print_left_out(f"{name} at {label}", error)
                self.left_out += name == own
        return found

    def times(self, own: str, ready: dict[str, Ready]) -> dict[str, Times]:
        """Of the sides that are ready, in turn."""
        found = interleave([side.variant for side in ready.values()], self.rounds)
        self.left_out += own in ready and own not in found
        return found

    def write(
        self, own: str, case: dict, ready: dict[str, Ready], times: dict[str, Times], rate: str, work: float, **facts
    ) -> None:
        """A row a side.

        Args:
          case: all that a row says of it but the backend.
          rate: "tflops" or "gbps".
          work: operations or bytes in a side's time.
          facts: whatever else there is to say.
        """
        for side, t in times.items():
            reached = work / t.us_p50 / {"tflops": 1e6, "gbps": 1e3}[rate]
            said = ready[side].facts | {rate: reached} | facts
            append_row(
                self.file,
                make_row(
                    case | {"backend": side},
                    t,
                    reached / self.ceiling,
                    ratios(side, times, own),
                    ready[side].max_err,
                    **said,
                ),
            )


def end(left_out: int) -> None:
    """
    Raises:
      typer.Exit: with 1, if jaxops itself failed somewhere.
    """
    if left_out:
        print(f"jaxops was left out {left_out} times", flush=True)
        raise typer.Exit(1)


def demand_place(out: str, smoke: bool) -> None:
    """
    Raises:
      typer.BadParameter: the rows would land among the results, and are none.
    """
    if not out and (smoke or not on_gpu()):
        raise typer.BadParameter("without a GPU, or with --smoke, the rows are no results: pass --out.")


def print_left_out(what: str, error: Exception) -> None:
    lines = (str(error) or type(error).__name__).splitlines()
    print(f"  left out: {what}: {type(error).__name__}: {' '.join(lines[:3])[:300]}", flush=True)


def measure_copy(copied_bytes: int, rounds: int = 3) -> tuple[float, Times]:
    """(GB/s read and written, times) of a copy: the ceiling of what is bound by the memory."""
    times = interleave([_copy_variant(copied_bytes)], rounds)["copy"]
    return _copy_gbps(copied_bytes, times), times


def write_copy(file: pathlib.Path, smoke: bool) -> float:
    """The copy bandwidth in GB/s, written as a row of its own."""
    start = time.perf_counter()
    copied = 1 << 20 if smoke else 2 << 30
    gbps, times = measure_copy(copied)
    append_row(file, copy_row(copied, times))
    print(f"copy {gbps:.0f} GB/s, after {time.perf_counter() - start:.0f} s", flush=True)
    return gbps


def measure_ceilings(
    n: int, dtype, copied_bytes: int, rounds: int = 3, dense: tuple[int, int, int] | None = None
) -> tuple[Ceilings, dict[str, Times]]:
    """Copy bandwidth, and the dense `x @ w` rate at n^3 and, where given, at dense = (M, K, N): the better of the two is the ceiling."""
    shapes = {"dense_square": (n, n, n)} | ({"dense_wide": dense} if dense else {})
    variants = [_copy_variant(copied_bytes)]
    for name, (m, k, width) in shapes.items():
        x, w = normal(1, (m, k), dtype), normal(2, (k, width), dtype)
        matmul, _ = compile_fits(jnp.matmul, x, w, cublas=True)
        guess_us = 2 * m * k * width / 6e8
        variants.append(
            Variant(name, functools.partial(_times, matmul, (x, w)), iterations_for(guess_us, 2 * m * width))
        )
    times = interleave(variants, rounds)
    rates = [2 * m * k * width / times[name].us_p50 / 1e6 for name, (m, k, width) in shapes.items() if name in times]
    return Ceilings(_copy_gbps(copied_bytes, times["copy"]), max(rates)), times


def write_dense(file: pathlib.Path, dtype, smoke: bool) -> float:
    """The dense rate in TFLOP/s; the copy of the same run is written as a row of its own."""
    start = time.perf_counter()
    n, copied = (64, 1 << 20) if smoke else (8192, 2 << 30)
    ceilings, times = measure_ceilings(n, dtype, copied)
    append_row(file, copy_row(copied, times["copy"]))
    print(f"dense {ceilings.dense_tflops:.0f} TFLOP/s, after {time.perf_counter() - start:.0f} s", flush=True)
    return ceilings.dense_tflops


def copy_row(copied_bytes: int, times: Times) -> dict:
    case = {
        "op": "copy",
        "pass": "fwd",
        "name": "copy",
        "dist": "",
        "backend": "xla",
        "shape": {"bytes": copied_bytes},
        "dtype": "float32",
    }
    return make_row(case, times, 1.0, {}, None, gbps=_copy_gbps(copied_bytes, times))


def _copy_variant(copied_bytes: int) -> Variant:
    source = normal(0, (copied_bytes // 4,), jnp.float32)
    negate, _ = compile_fits(
        jnp.negative, source
    )  # a plain copy may become a memcpy, which is no kernel and has no kernel time
    return Variant("copy", functools.partial(_times, negate, (source,)), min(8, iterations_for(1e3, copied_bytes)))


def _copy_gbps(copied_bytes: int, times: Times) -> float:
    return 2 * copied_bytes / times.us_p50 / 1e3


def _times(fn: Callable, args: tuple, iterations: int) -> list[float]:
    return call_times_us(fn, *args, iterations=iterations)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed: int, shape: tuple[int, ...], dtype) -> jax.Array:
    """Random normal data, made on the device. Zeros would draw less power and run at higher clocks."""
    if (
        len(shape) == 3
    ):  # one matrix at a time: the float32 and random bits of all of them are several times as large as the result
        return jax.lax.map(
            lambda key: jax.random.normal(key, shape[1:], dtype), jax.random.split(jax.random.key(seed), shape[0])
        )
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def l2_bytes(kind: str) -> int:
    """Of H100 and H200; elsewhere the largest there is (B200), so that nothing is called cold that may not be."""
    return (50 if "H100" in kind or "H200" in kind else 126) << 20


@functools.cache
def environment() -> dict[str, str | None]:
    """The part of a row that says where and with what it was measured."""
    return {
        "jax": jax.__version__,
        "triton": _version("triton"),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "device": jax.devices()[0].device_kind,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def results_folder(out: str) -> pathlib.Path:
    return (
        pathlib.Path(out)
        if out
        else ROOT / "benchmarks" / "results" / jax.devices()[0].device_kind.lower().replace(" ", "_")
    )


def ratios(side: str, times: dict[str, Times], own: str = "pallas") -> dict[str, float]:
    """A row's `vs`: how many times longer each peer takes; empty for a peer."""
    return (
        {peer: other.us_p50 / times[side].us_p50 for peer, other in times.items() if peer != own} if side == own else {}
    )


def cold(moved_bytes: int) -> bool:
    """Whether a call moves so much that it finds nothing of the call before in the L2."""
    return moved_bytes >= 2 * l2_bytes(jax.devices()[0].device_kind)


def make_row(
    case: dict, times: Times, of_ceiling: float | None, vs: dict[str, float], max_err: float | None, **rates
) -> dict:
    """One row of design's schema. case: op, pass, name, shape, dtype, dist, backend. rates: tflops or gbps, and whatever else the case has to say."""
    rounded = {key: round(value, 2) for key, value in dataclasses.asdict(times).items()}
    more = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in rates.items()}
    ratios = {peer: round(ratio, 3) for peer, ratio in vs.items()}
    row = case | rounded | more | {"of_ceiling": None if of_ceiling is None else round(of_ceiling, 4), "vs": ratios}
    row |= {"max_err": None if max_err is None else float(f"{max_err:.3g}")} | environment()
    if missing := set(ROW_KEYS) - set(row):
        raise ValueError(f"a row lacks {sorted(missing)}: {row}")
    return row


def append_row(file: pathlib.Path, row: dict) -> None:
    """Written at once, so that a run that dies keeps what it measured."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _commit() -> str:
    """JAXOPS_COMMIT, where a copy of the sources is measured; else git's short hash, with + where the package has uncommitted changes."""
    if told := os.environ.get("JAXOPS_COMMIT"):
        return told
    commit = _first_line("git", "rev-parse", "--short", "HEAD")
    return (
        "unknown"
        if commit is None
        else commit + ("+" if _first_line("git", "status", "--porcelain", "--", "jaxops") else "")
    )
