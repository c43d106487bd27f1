"""This package beside an earlier commit's, interleaved in one run, over the cases of the other benchmarks.

python -m benchmarks.harness.before 2b33942                           # first: the earlier package, in .before/
python -m benchmarks before                             # everything
python -m benchmarks before --ops grouped_matmul,moe    # some: each call compiles what it measures
python -m benchmarks before --summary benchmarks/results/nvidia_h200/before.jsonl
python -m benchmarks before --smoke --out /tmp/x        # tiny shapes, every code path, CPU too

Rows have the peer "before": `vs` above 1 means that this package is faster. Both packages run with
the tuned rows that ship with them. A row below --floor is measured a second time, with twice the rounds, and says so.
"""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import typer

import jaxops
from benchmarks import harness
from benchmarks.harness import before
from benchmarks.harness.machine import measure_ceilings
from benchmarks.ops.before_cases import OPS, Case, cases_of, geometric_mean
from jaxops.tuning import use_rows

OURS, BEFORE = "jaxops", "before"
MAX_RMS = (
    2e-2  # difference of the two packages' results over their RMS: they round to bfloat16 or FP8 in the same places
)
Packages = dict[str, ModuleType]
Programs = dict[tuple[str, str], Any]  # (side, Case.program) -> compiled, or the exception of compiling it


@dataclasses.dataclass(kw_only=True)
class Run(harness.Run):
    """ratios: of each op, by case; left_out counts the cases without a ratio."""

    floor: float
    packages: Packages
    commit: str
    ratios: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


def compile_all(cases: list[Case], packages: Packages, backend: str) -> Programs:
    """All programs of an op, in parallel threads, from abstract operands.

    XLA's own Triton GEMMs are off: it picks them by timing, here beside other threads' work.
    """
    wanted = {(side, case.program): case for case in cases for side in packages}

    def compiled(key: tuple[str, str]) -> Any:
        package, case = packages[key[0]], wanted[key]
        try:
            # use_rows is a context of one thread.
            with use_rows("shipped"):
                operands = jax.eval_shape(lambda: case.operands(package, case.inputs()))
                lowered = jax.jit(functools.partial(case.call, package, backend)).lower(*operands)
                return lowered.compile({"xla_gpu_enable_triton_gemm": False})
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return dict(zip(wanted, pool.map(compiled, wanted), strict=True))


def _mean(x: jax.Array) -> jax.Array:
    """Row by row: the number of all elements may exceed int32."""
    return jnp.mean(jnp.mean(jnp.atleast_1d(x), axis=-1))


@jax.jit
def _difference(got: Any, want: Any) -> tuple[jax.Array, jax.Array]:
    """(largest, RMS) difference over the RMS of each result, the worst of all."""
    found = []
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = g.astype(jnp.float32), w.astype(jnp.float32)
        scale = jnp.sqrt(_mean(w**2))
        scale = jnp.where(scale > 0, scale, 1)
        found.append(jnp.stack([jnp.max(jnp.abs(g - w)), jnp.sqrt(_mean((g - w) ** 2))]) / scale)
    worst = jnp.max(jnp.stack(found), axis=0)  # max passes NaN on
    return worst[0], worst[1]


def demand_same(results: dict[str, Any]) -> float:
    """The largest difference of the two sides' results, over their RMS.

    Raises:
      ArithmeticError: they differ by more than rounding.
    """
    max_err, rms_err = (float(x) for x in _difference(results[OURS], results[BEFORE]))
    if not rms_err <= MAX_RMS:
        raise ArithmeticError(f"the packages differ: max {max_err:.2e}, RMS {rms_err:.2e} of the results' RMS")
    return max_err


def ready_sides(case: Case, programs: Programs, operands: dict[str, tuple]) -> dict[str, harness.Ready]:
    """Both sides, their results compared; both do the same number of calls a round.

    Raises:
      Exception: a side failed, or the results differ.
    """
    results = {}
    for side in operands:
        if isinstance(error := programs[side, case.program], Exception):
            raise RuntimeError(f"{side}: {type(error).__name__}: {error}") from error
        results[side] = programs[side, case.program](*operands[side])
    max_err = demand_same(results)
    out_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(results[OURS]))
    del results
    ready = {
        side: harness.ready(side, programs[side, case.program], operands[side], out_bytes, max_err) for side in operands
    }
    calls = max(side.variant.iterations for side in ready.values())
    return {
        side: dataclasses.replace(one, variant=dataclasses.replace(one.variant, iterations=calls))
        for side, one in ready.items()
    }


def measure_case(run: Run, case: Case, programs: Programs, inputs: tuple) -> None:
    """Checks, times and writes both sides of one case."""
    try:
        with use_rows("shipped"):
            operands = {side: case.operands(package, inputs) for side, package in run.packages.items()}
        ready = ready_sides(case, programs, operands)
    except Exception as error:
        run.left_out += 1
        harness.print_left_out(case.label, error)
        return
    variants, rounds = [side.variant for side in ready.values()], run.rounds
    times = harness.interleave(variants, rounds)
    if len(times) == 2 and times[BEFORE].us_p50 < run.floor * times[OURS].us_p50:
        rounds *= 2
        times = harness.interleave(variants, rounds)
    if len(times) < 2:
        run.left_out += 1
        return
    run.ceiling = run.ceilings.dense_tflops if case.rate == "tflops" else run.ceilings.copy_gbps
    facts = {"rounds": rounds, "before": run.commit}
    run.write(OURS, case.row, ready, times, case.rate, case.work, **facts)
    ratio = times[BEFORE].us_p50 / times[OURS].us_p50
    run.ratios.setdefault(case.op, {})[case.label] = ratio
    both = f"{times[OURS].us_p50:9.1f} us, before {times[BEFORE].us_p50:9.1f} us"
    print(f"{case.label:70}{both}  {ratio:.3f}{' again' * (rounds > run.rounds)}", flush=True)


def read_ratios(file: pathlib.Path) -> dict[str, dict[str, float]]:
    """As Run.ratios, from a file's rows; of each case the newest."""
    found: dict[str, dict[str, float]] = {}
    for row in map(json.loads, file.read_text("utf-8").splitlines()):
        if BEFORE in row["vs"]:
            found.setdefault(row["op"], {})[harness.label_of(row)] = row["vs"][BEFORE]
    return found


def print_summary(ratios: dict[str, dict[str, float]], floor: float) -> None:
    for op, of_op in ratios.items():
        mean = geometric_mean(list(of_op.values()))
        print(f"{op:28}{len(of_op):4} rows, geometric mean {mean:.4f}, least {min(of_op.values()):.3f}")
    every = {label: ratio for of_op in ratios.values() for label, ratio in of_op.items()}
    if every:
        print(f"{'all':28}{len(every):4} rows, geometric mean {geometric_mean(list(every.values())):.4f}")
    slow = {label: ratio for label, ratio in every.items() if ratio < floor}
    print(f"{len(slow)} rows below {floor}")
    for label, ratio in sorted(slow.items(), key=lambda item: item[1]):
        print(f"  {ratio:.3f}  {label}")


def main(
    ops: str = typer.Option(",".join(OPS), help="Comma-separated."),
    names: str = typer.Option("", help="Only workloads with one of these in their labels; all by default."),
    folder: str = typer.Option(str(before.FOLDER), help="Where benchmarks.harness.before put the earlier package."),
    backend: str = typer.Option("auto", help="Of both packages."),
    out: str = harness.OUT,
    rounds: int = typer.Option(6, help="Of both sides, in random order."),
    floor: float = typer.Option(0.97, help="A ratio below is measured again, and listed at the end."),
    summary: str = typer.Option("", help="Measure nothing, print the summary of this file of rows."),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/before.jsonl; exits with 1 if a case has no ratio."""
    if summary:
        print_summary(read_ratios(pathlib.Path(summary)), floor)
        return
    file = harness.begin("before", out, smoke)
    package, commit = before.load_before(pathlib.Path(folder))
    ceilings = measure_ceilings(file, smoke, dtype=jnp.bfloat16)
    packages = {OURS: jaxops, BEFORE: package}
    run = Run(
        file=file,
        rounds=rounds,
        ceiling=None,
        peers=[BEFORE],
        floor=floor,
        packages=packages,
        commit=commit,
        ceilings=ceilings,
    )
    for op in ops.split(","):
        cases = [case for case in cases_of(op, smoke) if any(name in case.label for name in names.split(","))]
        programs = compile_all(cases, packages, backend)
        run.done(f"{op}: {len(programs)} programs compiled,")
        shape, inputs = "", ()
        for case in cases:
            if case.shape.name != shape:
                del inputs
                shape, inputs = case.shape.name, case.inputs()
            measure_case(run, case, programs, inputs)
        run.done(op)
    print_summary(run.ratios, floor)
    harness.end(run.left_out)
