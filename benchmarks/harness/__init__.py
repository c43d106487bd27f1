"""What every benchmark shares: interleaved device times, checks before times, the machine's ceilings, options."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import jax
import numpy as np
import typer

from benchmarks.harness import checks
from benchmarks.harness.rows import (  # noqa: F401  (some for the benchmarks, which import this module only)
    ROOT,
    ROW_KEYS,
    Named,
    Times,
    append_row,
    case_of,
    environment,
    label_of,
    make_row,
    ratios,
    results_folder,
)
from benchmarks.peers.torch_process import TorchProcess
from jaxops.profiling.device_times import device_times_us, kernel_times_us, wall_times_us
from models.distributed import device_memory

WORK_US = 30_000  # of measured work a variant and round: enough to average, and to keep the card equally warm
LEAST_CALLS = 3  # a round
ALIVE_BYTES = 25e9  # results that may be alive at a time: CUPTI's measurement keeps those of all its iterations
OUT = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default.")
SMOKE = typer.Option(False, help="Tiny shapes, every code path; needs --out.")


def shapes_option(named, sets: Iterable[str] = ()) -> Any:
    """sets: names of whole sets, one of which may stand instead."""
    instead = f"; or one of {', '.join(sets)}" if sets else ""
    return typer.Option(",".join(named), "--shapes", help=f"Comma-separated names from benchmarks/shapes{instead}.")


def names(text: str, known: Iterable[str] | None = None) -> list[str]:
    """The parts of a comma-separated option.

    Args:
      known: all that it may have; None for any.

    Raises:
      typer.BadParameter: an unknown name.
    """
    found = [name for name in text.split(",") if name]
    if known is not None and (unknown := [name for name in found if name not in (known := list(known))]):
        raise typer.BadParameter(f"{', '.join(unknown)}: write some of {', '.join(known)}.")
    return found


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
    """A side that passed its check and can be timed.

    Attributes:
      variant: what `interleave` calls.
      max_err: of the check; None without one.
      facts: further entries of its row: launches, compile_s, recipe; "backend" if that is not the side's name.
      us: of one call, roughly.
    """

    variant: Variant
    max_err: float | None
    facts: dict
    us: float = 0.0


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def take_memory(**more: str) -> None:
    """Gives JAX 0.95 of the device's memory; its default is three quarters.

    Call it before JAX's backend starts.

    Args:
      more: further environment variables.
    """
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"} | more
    device_memory.disable_partitioning()


def call_times_us(fn: Callable, *args, iterations: int) -> list[float]:
    """Device time of each call on a GPU; elsewhere wall time, which only tests the code path."""
    return (device_times_us if on_gpu() else wall_times_us)(fn, *args, iterations=iterations)


def kernels(fn: Callable, *args) -> list[tuple[str, float]]:
    """(name, microseconds) of each kernel that one call launches; empty without a GPU."""
    return kernel_times_us(fn, *args)


def compile_fits(fn: Callable, *args, cublas: bool = False) -> tuple[Callable, float]:
    """(fn compiled for args, seconds). With cublas, XLA may not use its own Triton GEMMs for `x @ w`.

    Raises:
      MemoryError: its temporaries and results exceed the free device memory.
    """
    start = time.perf_counter()
    compiled = jax.jit(fn).lower(*args).compile({"xla_gpu_enable_triton_gemm": False} if cublas else None)
    seconds = time.perf_counter() - start
    if (needed := compiled.memory_analysis()) is not None:
        demand_room(needed.temp_size_in_bytes + needed.output_size_in_bytes, "temporaries and results")
    return compiled, seconds


def demand_room(need_bytes: int, what: str) -> None:
    """
    Raises:
      MemoryError: the device has less free memory. The allocator would retry for ten seconds.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats and need_bytes > (left := stats["bytes_limit"] - stats["bytes_in_use"]):
        raise MemoryError(f"needs {need_bytes / 1e9:.1f} GB of {what}, {left / 1e9:.1f} GB are left")


def ready(side: str, compiled: Callable, args: tuple, out_bytes: int, max_err: float | None) -> Ready:
    """A compiled JAX side whose result is right, with its number of launches and of calls a round."""
    launched = kernels(compiled, *args)
    us = sum(us for _, us in launched) if launched else WORK_US / 3
    variant = Variant(side, functools.partial(times_of, compiled, args), iterations_for(us, out_bytes))
    return Ready(variant, max_err, {"launches": len(launched)} if launched else {}, us)


def checked(side: str, compiled: tuple[Callable, float], args: tuple, check: Callable[[Any], Any], **facts) -> Ready:
    """Calls a side, checks its results, and gets it ready to be timed.

    Args:
      compiled: as from `compile_fits`.
      check: results -> their largest error or None; raises if they are wrong.
      facts: further entries of its row.
    """
    call, seconds = compiled
    results = call(*args)
    max_err = check(results)
    out_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(results))
    del results
    side_ready = ready(side, call, args, out_bytes, max_err)
    side_ready.facts |= {"compile_s": seconds} | facts
    return side_ready


def leave_room_for_torch() -> None:
    """Call it before JAX's backend starts: torch's processes share the card."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.72")


@contextlib.contextmanager
def torch_beside(
    peer: tuple[str, dict[str, Any]] | None, peers: Sequence[str], answer_seconds: float = 180
) -> Iterator[TorchProcess | None]:
    """torch's process after a first, small case; None where it is not asked for, or fails, with the reason printed.

    Args:
      peer: its name, and the request of the first case.
    """
    if peer is None or peer[0] not in peers:
        yield None
        return
    name, first = peer
    torch = TorchProcess(root=str(ROOT), answer_seconds=answer_seconds)
    with contextlib.closing(torch):
        works = True
        try:
            torch.ask(do="prepare", **first)
        except RuntimeError as error:
            print_left_out(name, error)
            works = False
        yield torch if works else None


def torch_ready(name: str, torch: TorchProcess, request: dict[str, Any]) -> Ready:
    """A case that torch's process has prepared and checked."""
    answer = torch.ask(do="prepare", **request)
    for refusal in answer.get("refusals", ()):
        print(f"  {name}: refused: {refusal}", flush=True)
    # torch's allocator reuses one result, so only the time counts.
    variant = Variant(name, torch.times_us, iterations_for(answer["us"], 0))
    return Ready(variant, answer.get("max_err"), {"recipe": answer["recipe"]})


def iterations_for(us: float, out_bytes: int) -> int:
    """Calls a round: about WORK_US of work, at least 3 (1 if a call takes over 100 ms), results within ALIVE_BYTES."""
    wanted = 1 if us > 1e5 else min(50, max(LEAST_CALLS, round(WORK_US / max(us, 1.0))))
    # The warm-up's result may still be alive beside them.
    return max(1, min(wanted, int(ALIVE_BYTES / max(out_bytes, 1)) - 1))


def interleave(variants: Sequence[Variant], rounds: int = 5, work_us: float = WORK_US) -> dict[str, Times]:
    """Times all variants in each round, in a random order, so that drifting clocks and heat affect all of them.

    A round's calls are reduced as work_us is below WORK_US, to LEAST_CALLS at least.

    The order matters: under a hot kernel the card lowers its clocks within milliseconds, which slows the next variant.
    A variant that raises is left out, with its reason printed.
    """
    samples: dict[str, list[float]] = {variant.name: [] for variant in variants}
    failed: set[str] = set()
    order = np.random.default_rng(0)
    for _ in range(rounds):
        for variant in (variants[i] for i in order.permutation(len(variants))):
            if variant.name not in failed:
                least = min(LEAST_CALLS, variant.iterations)
                try:
                    samples[variant.name] += variant.times_us(max(least, round(variant.iterations * work_us / WORK_US)))
                except Exception as error:  # a peer's failure is a finding about the peer, not the end of the run
                    failed.add(variant.name)
                    print_left_out(variant.name, error)
    return {name: Times.of(times) for name, times in samples.items() if times and name not in failed}


@dataclasses.dataclass(kw_only=True)
class Run:
    """What all cases of a benchmark share.

    Attributes:
      ceiling: the copy bandwidth in GB/s or the dense rate in TFLOP/s, as the rows' rate; None for no of_ceiling.
      peers: in JAX.
      work_us: of `interleave`.
      again_below: a case in which a peer's time over the own one is less than this, by peer, is timed once more: the
        second times count, and its rows have "again".
      ceilings: of the machine, as far as they were measured.
      options: chosen values of the benchmark's options.
      programs: that were compiled before the first case.
      left_out: how many own sides failed.
    """

    file: pathlib.Path
    rounds: int
    ceiling: float | None
    peers: list[str]
    work_us: float = WORK_US
    again_below: dict[str, float] = dataclasses.field(default_factory=dict)
    ceilings: Any = None
    torch: TorchProcess | None = None
    options: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)
    left_out: int = 0
    started: float = dataclasses.field(default_factory=time.perf_counter)

    def sides(self, own: str, make: Callable[..., Ready], *args) -> dict[str, Callable[[], Ready]]:
        """`make(name, *args)` for own and for each peer, to be called by `measure`."""
        return {name: functools.partial(make, name, *args) for name in (own, *self.peers)}

    def torch_side(self, name: str, case: dict, limits: str, **more) -> dict[str, Callable[[], Ready]]:
        """`case` by torch's process, for `measure`; nothing without one. limits: of `checks.LIMITS`."""
        if self.torch is None:
            return {}
        request = {"op": case["op"], "pass": case["pass"], "dist": case["dist"], "limits": checks.LIMITS[limits]}
        return {name: functools.partial(torch_ready, name, self.torch, request | case["shape"] | more)}

    def ready_sides(
        self, own: str | Collection[str], label: str, makers: dict[str, Callable[[], Ready]]
    ) -> dict[str, Ready]:
        """The sides whose makers do not raise; for the others the error is printed."""
        own, sides = {own} if isinstance(own, str) else own, {}
        for name, make in makers.items():
            try:
                sides[name] = make()
            except Exception as error:
                print_left_out(f"{name} at {label}", error)
                self.left_out += name in own
        return sides

    def time(
        self, own: str | Collection[str], label: str, makers: dict[str, Callable[[], Ready]], most: int | None = None
    ) -> tuple[dict[str, Ready], dict[str, Times]]:
        """The sides of a case, checked, and the times of those that ran.

        most: so many sides besides the own ones are timed, those that are the fastest in a single call.
        """
        sides, own = self.ready_sides(own, label, makers), {own} if isinstance(own, str) else set(own)
        others = sorted(set(sides) - own, key=lambda name: sides[name].us)[:most]
        sides = {name: side for name, side in sides.items() if name in own | set(others)}
        times = self.interleave(sides)
        self.left_out += len(own & set(sides) - set(times))
        return sides, times

    def interleave(self, sides: dict[str, Ready]) -> dict[str, Times]:
        return interleave([side.variant for side in sides.values()], self.rounds, self.work_us)

    def measure(
        self, own: str, case: dict, makers: dict[str, Callable[[], Ready]], rate: str, work: float, **facts
    ) -> None:
        """Checks, times, writes and prints every side of a case; arguments as of `write`."""
        label = label_of(case | facts)
        sides, times = self.time(own, label, makers)
        if any(ratio < self.again_below.get(peer, 0) for peer, ratio in ratios(own, times, own).items()):
            times |= self.interleave(sides)
            facts["again"] = True
        self.write(own, case, sides, times, rate, work, **facts)
        unit, scale = {"tflops": ("TFLOP/s", 1e6), "gbps": ("GB/s", 1e3)}[rate]
        line = " | ".join(f"{name} {t.us_p50:.1f} us {work / t.us_p50 / scale:.0f} {unit}" for name, t in times.items())
        print(
            f"{label:40} {line}{' | again' if 'again' in facts else ''}"
            f"{'' if facts.get('cold', True) else ' | caches not cold'}",
            flush=True,
        )

    def write(
        self, own: str, case: dict, sides: dict[str, Ready], times: dict[str, Times], rate: str, work: float, **facts
    ) -> None:
        """Writes a row a side.

        Args:
          case: as from `case_of`.
          rate: "tflops" or "gbps".
          work: operations or bytes in a side's time.
          facts: further entries of all rows; with `least_us`, of_ceiling is that time over the side's.
        """
        for side, t in times.items():
            self.write_side(case, side, sides[side], t, ratios(side, times, own), rate, work, **facts)

    def write_side(
        self, case: dict, name: str, side: Ready, t: Times, vs: dict[str, float], rate: str, work: float, **facts
    ) -> None:
        """Writes the row of one side; arguments as of `write`."""
        reached = work / t.us_p50 / {"tflops": 1e6, "gbps": 1e3}[rate]
        of_ceiling = None if self.ceiling is None else reached / self.ceiling
        if (least_us := facts.pop("least_us", None)) is not None:
            of_ceiling = least_us / t.us_p50
        row = {"backend": name} | side.facts | {rate: reached} | facts
        named = case | {"backend": row.pop("backend")}
        append_row(self.file, make_row(named, t, of_ceiling, vs, side.max_err, **row))

    def done(self, what: str) -> None:
        print(f"{what} done after {time.perf_counter() - self.started:.0f} s", flush=True)


def end(left_out: int) -> None:
    """
    Raises:
      typer.Exit: with 1, if jaxops itself failed somewhere.
    """
    if left_out:
        print(f"jaxops was left out {left_out} times", flush=True)
        raise typer.Exit(1)


def host_devices(count: int) -> None:
    """So many devices of a CPU, for --smoke."""
    with contextlib.suppress(RuntimeError):  # the devices are there already
        jax.config.update("jax_num_cpu_devices", count)


class Compiled(NamedTuple):
    """result: what was compiled. seconds: of tracing and compiling, beside other compilations."""

    result: Any
    seconds: float


def tracing(fn: Any, *given, **options) -> Callable[[], Callable[[], Any]]:
    """A jitted function for `start_compiling`, with options of the compiler. Without any, the program is the one that
    calls of fn with like arguments run."""

    def trace() -> Callable[[], Any]:
        traced = fn.trace(*given)
        return lambda: traced.lower().compile(options or None)

    return trace


def start_compiling(pool: Executor, trace: Callable[[], Callable[[], Any]]) -> "Future[Compiled]":
    """Traces on this thread, by trace(), and compiles in the pool, by what it returns. Failures are the future's."""
    begin = time.perf_counter()
    try:
        compiling = trace()
    except Exception as error:
        failed: Future[Compiled] = Future()
        failed.set_exception(error)
        return failed
    traced = time.perf_counter() - begin

    def compiled() -> Compiled:
        begin = time.perf_counter()
        return Compiled(compiling(), traced + time.perf_counter() - begin)

    return pool.submit(compiled)


def begin(name: str, out: str, smoke: bool, devices: int = 1) -> pathlib.Path:
    """The file of a benchmark's rows, of a case that runs on so many devices.

    Raises:
      typer.BadParameter: the rows are no results, but would be written among them.
    """
    if not out and (smoke or not on_gpu()):
        raise typer.BadParameter("without a GPU, or with --smoke, the rows are no results: pass --out.")
    return results_folder(out, devices) / f"{name}.jsonl"


def print_left_out(what: str, error: Exception) -> None:
    lines = (str(error) or type(error).__name__).splitlines()
    print(f"  left out: {what}: {type(error).__name__}: {' '.join(lines[:3])[:300]}", flush=True)


def times_of(fn: Callable, args: tuple, iterations: int) -> list[float]:
    return call_times_us(fn, *args, iterations=iterations)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed: int, shape: tuple[int, ...], dtype) -> jax.Array:
    """Random normal data, made on the device. Zeros would draw less power and run at higher clocks."""
    if len(shape) == 3:  # a matrix at a time: the float32 random bits of all take several times the result's memory
        keys = jax.random.split(jax.random.key(seed), shape[0])
        return jax.lax.map(lambda key: jax.random.normal(key, shape[1:], dtype), keys)
    return jax.random.normal(jax.random.key(seed), shape, dtype)
