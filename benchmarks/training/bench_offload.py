"""Training steps that fill the card, with activations kept, recomputed (by jaxops and by JAX alone) or offloaded.

python -m benchmarks offload                        # a decoder and a DiT of 7 billion parameters in 24 layers
python -m benchmarks offload --smoke --out /tmp/x   # a tiny decoder, every code path
"""

import contextlib
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import typer

from benchmarks import harness
from benchmarks.harness.machine import measure_ceilings
from benchmarks.harness.traces import KERNELS, TO_DEVICE, TO_HOST, device_events, lane_of, write_trace
from benchmarks.training import bench_train_step
from benchmarks.training.bench_train_step import Workload, compile_step, speeds
from jaxops.offload import Policy, Report, report
from jaxops.offload.reports import needed_bytes
from jaxops.profiling.trace import Event, exposed_us, union_us
from models import layers
from models.decoder import DecoderConfig
from models.training.presets import DIT_PRESETS, PRESETS, DiTPreset, Preset

KEEP, RECOMPUTE, JAX_REMAT = "keep", "recompute", "jax_remat"
OFFLOAD, MOST, INPUTS = "offload", "offload_most", "offload_inputs"
POLICIES = {
    KEEP: None,  # the layers unrolled, which is the fastest and takes the least memory
    RECOMPUTE: Policy(),
    JAX_REMAT: Policy(),  # the same without jaxops.offload, see `without_jaxops`
    MOST: Policy(offload=("carry", "attention", "middle")),
    INPUTS: Policy(offload=("carry",)),  # the least on the device
}
LONG_US = 2e7  # of steps that are not profiled
RESERVED = 2e9  # bytes of the device that no program has: the driver's, the libraries' workspaces


class Case(NamedTuple):
    """A model whose batches are a number of rows.

    Attributes:
      everything: the policy of OFFLOAD, which recomputes no product: what fits on the device is kept.
      make: of (preset, backend, precision, steps), as in bench_train_step.
      resized: the preset with that many rows a batch, and a policy.
      runs: sides and batches to run, in this order.
      compiled: sides and batches that are only compiled, for their memory.
    """

    everything: Policy
    make: Callable[..., Workload]
    resized: Callable[[int, Policy | None], Any]
    runs: list[tuple[str, int]]
    compiled: list[tuple[str, int]]


def decoder(preset: Preset) -> Callable[[int, Policy | None], Preset]:
    return lambda rows, policy: dataclasses.replace(
        preset, batch=rows, model=dataclasses.replace(preset.model, policy=policy, unroll=policy is None)
    )


def dit(preset: DiTPreset) -> Callable[[int, Policy | None], DiTPreset]:
    """A row is as many tokens as the largest image has."""
    return lambda rows, policy: dataclasses.replace(
        preset, tokens=rows * preset.longest, policy=policy, unroll=policy is None
    )


DENSE = DecoderConfig(32_768, 5120, layers=24, heads=40, kv_heads=8, head_dim=128, hidden=14_336, tie_embeddings=True)
CASES = {
    "decoder_7b": Case(
        Policy(keep=("mlp", "middle"), offload=("carry", "attention")),
        bench_train_step.lm,
        decoder(dataclasses.replace(PRESETS["3b"], model=DENSE, context=2048)),
        [(KEEP, 4), (RECOMPUTE, 10), (JAX_REMAT, 10), (OFFLOAD, 10), (MOST, 24), (INPUTS, 60)],
        [(RECOMPUTE, 32), (KEEP, 1)],
    ),
    "dit_7b": Case(
        Policy(keep=("mlp", "attention", "branch.mlp"), offload=("carry", "branch.attention")),
        bench_train_step.dit,
        dit(
            dataclasses.replace(DIT_PRESETS["1b"], layers=24, width=3968, heads=31, longest=2048, images=128, ema=None)
        ),
        [(KEEP, 3), (RECOMPUTE, 10), (JAX_REMAT, 10), (OFFLOAD, 10), (INPUTS, 58)],
        [(RECOMPUTE, 20), (KEEP, 1)],
    ),
}
TINY_DENSE = DecoderConfig(256, 64, layers=2, heads=2, kv_heads=2, head_dim=32, hidden=96, tie_embeddings=True)
TINY = [(KEEP, 2), (JAX_REMAT, 2), (OFFLOAD, 2)]
SMOKE = {
    "decoder_smoke": Case(
        Policy(keep=("mlp", "middle"), offload=("carry", "attention")),
        bench_train_step.lm,
        decoder(dataclasses.replace(PRESETS["demo"], model=TINY_DENSE, context=64)),
        TINY,
        [(OFFLOAD, 4)],
    )
}


@contextlib.contextmanager
def without_jaxops() -> Iterator[None]:
    """Layers scanned and rematerialized by JAX alone, with XLA's default options."""

    def scan(layer: Any, x: Any, xs: Any, *, policy: Policy) -> Any:
        return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, xs)

    with mock.patch.object(layers, "scan", scan), mock.patch.object(layers, "compiler_options", return_value={}):
        yield


def only(case: Case, sides: list[str]) -> Case:
    return case._replace(
        runs=[run for run in case.runs if run[0] in sides], compiled=[run for run in case.compiled if run[0] in sides]
    )


class Measured(NamedTuple):
    """us: of each step; events: of one step."""

    us: list[float]
    losses: list[float]
    compile_s: float
    report: Report
    events: list[Event]


def measure(workload: Workload, compiled: Any, compile_s: float, limit_s: float) -> Measured:
    """A warm-up step, which pins host memory, then timed steps for `limit_s`, then one step under the profiler."""
    us, losses = [], []
    state, key = workload.start(), jax.random.key(0)
    for batch in itertools.cycle(workload.batches):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, batch, key))
        losses.append(float(metrics.loss))
        us.append(1e6 * (time.perf_counter() - start))
        if len(us) > 1 and sum(us[1:]) > 1e6 * limit_s:
            break
    profile = us[-1] < LONG_US
    events = device_events(lambda: compiled(state, workload.batches[0], key)) if profile else []
    return Measured(us[1:], losses, compile_s, report(compiled), events)


def hidden_copies(events: list[Event]) -> dict[str, list[float]]:
    """For "host" and "device": microseconds of copies, and the share of them beside a running kernel."""
    lanes = {lane: [event for event in events if lane_of(event) == lane] for lane in (KERNELS, TO_HOST, TO_DEVICE)}
    hidden = {}
    for to, lane in (("host", TO_HOST), ("device", TO_DEVICE)):
        total, exposed = union_us(lanes[lane]), exposed_us(lanes[lane], lanes[KERNELS])
        hidden[to] = [round(total, 1), round(1 - exposed / total, 4) if total else 0.0]
    return hidden


def largest(needed: dict[tuple[str, int], int], side: str, budget: float) -> float | None:
    """Rows of the largest batch that fits, extrapolated from the bytes of two batches, which grow linearly."""
    points = sorted((rows, bytes_) for (of, rows), bytes_ in needed.items() if of == side)
    if len(points) < 2 or points[-1][1] == points[0][1]:
        return None
    slope = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    return points[0][0] + (budget - points[0][1]) / slope


def measure_case(name: str, case: Case, file: pathlib.Path, dense: float, limit_s: float, smoke: bool) -> int:
    """The number of failed runs.

    Programs that are only compiled come first: a run's row needs their numbers, and is written after the run.
    """
    needed: dict[tuple[str, int], int] = {}
    per_token: dict[str, float] = {}
    failed = 0
    for side, rows in case.compiled + case.runs:
        try:
            policy = case.everything if side == OFFLOAD else POLICIES[side]
            with without_jaxops() if side == JAX_REMAT else contextlib.nullcontext():
                workload = case.make(case.resized(rows, policy), "auto", "float32" if smoke else "bfloat16", 6)
                if (side, rows) in case.compiled:
                    needed[side, rows] = needed_bytes(compile_step(workload))[0]
                    print(f"{name} {side} of {rows} rows: {needed[side, rows] / 1e9:.1f} GB", flush=True)
                else:
                    begin = time.perf_counter()
                    step = compile_step(workload)
                    measured = measure(workload, step, time.perf_counter() - begin, limit_s)
                    needed[side, rows] = measured.report.device_bytes
                    per_token[side] = float(np.median(measured.us)) / workload.tokens
                    compiled = f"{name} {side} of {rows} rows, compiled in {measured.compile_s:.0f} s"
                    print(f"{compiled}: {measured.report}\n  losses {measured.losses[:3]}", flush=True)
                    named = harness.Named(name, workload.shape)
                    row = harness.case_of("train_step", "step", named, "bfloat16", f"{rows} rows") | {"backend": side}
                    write(file, row, workload, measured, dense, needed, per_token)
        except Exception as error:
            failed += 1
            harness.print_left_out(f"{side} of {rows} rows at {name}", error)
        jax.clear_caches()
    return failed


def write(
    file: pathlib.Path, run: dict, workload: Workload, measured: Measured, dense: float,
    needed: dict[tuple[str, int], int], per_token: dict[str, float],
) -> None:  # fmt: skip
    """A run's row, and OFFLOAD's trace. needed and per_token are of all runs so far, including this one."""
    side, times = run["backend"], harness.Times.of(measured.us)
    budget = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0) - RESERVED
    peers = (KEEP, RECOMPUTE, JAX_REMAT) if side.startswith(OFFLOAD) else ()
    vs = {other: us / per_token[side] for other, us in per_token.items() if other in peers}
    facts: dict[str, Any] = speeds(workload, times)
    copies = hidden_copies(measured.events)
    facts |= {"peak_bytes": measured.report.device_bytes, "host_bytes": measured.report.host_bytes}
    facts |= {"copies_us_and_hidden": copies, "largest_rows": largest(needed, side, budget)}
    facts |= {"needed_bytes": {str(n): size for (of, n), size in sorted(needed.items()) if of == side}}
    facts |= {"compile_s": measured.compile_s, "loss": measured.losses[0]}
    harness.append_row(file, harness.make_row(run, times, facts["tflops"] / dense, vs, None, **facts))
    speed = f"{times.us_p50 / 1e3:.1f} ms, {facts['tokens_per_s']:,.0f} tokens/s, MFU {facts['mfu']:.1%}"
    print(f"{run['name']} {side} of {run['dist']}: {speed}, {vs}", flush=True)
    print(f"  fits {facts['largest_rows']}, copies {copies}", flush=True)
    if side == OFFLOAD and measured.events:
        write_trace(measured.events, file.with_name(f"offload_{run['name']}.trace.json.gz"))


def main(
    models: str = typer.Option(",".join(CASES)),
    sides: str = typer.Option(",".join((*POLICIES, OFFLOAD))),
    limit: float = typer.Option(
        6.0,
        help="Seconds of timed steps, the same for all sides: a card at its power limit slows down in the first ones.",
    ),
    out: str = harness.OUT,
    smoke: bool = typer.Option(False, help="A tiny decoder, every code path; needs --out."),
) -> None:
    """Appends to <out>/offload.jsonl; exits with 1 if a run failed. A row's `vs` is of times a token."""
    harness.take_memory(XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="112")
    file = harness.begin("offload", out, smoke)
    dense = measure_ceilings(file, smoke, dtype=np.float32 if smoke else jax.numpy.bfloat16).dense_tflops
    failed, chosen = 0, harness.names(sides, (*POLICIES, OFFLOAD))
    for name, case in (SMOKE if smoke else {name: CASES[name] for name in models.split(",")}).items():
        failed += measure_case(name, only(case, chosen), file, dense, 0.0 if smoke else limit, smoke)
    harness.end(failed)
