"""grouped_matmul's plan beside all candidates of tuning, at products of models or at random shapes.

python -m benchmarks unseen_shapes --seed 7                     # 12 products of models, 4 routings, three passes
python -m benchmarks unseen_shapes --shapes random --count 20   # random shapes, even and skewed groups
python -m benchmarks unseen_shapes --smoke --out /tmp/x         # a tiny shape, every code path, CPU too

Rows of op grouped_matmul. Side jaxops is the plan of "auto", side tuned the fastest candidate of this very case: shape,
pass and distribution. A `vs` of 0.9 means that the plan takes 1.11 times as long. No plan reaches 1 in all cases, since
its tiles serve every distribution. In rows before 2026-11-28 tuned is the candidate that is the fastest on the mean of
two distributions, which is less strict.

A single call of each candidate decides which few are timed beside the plan. Where the plan takes more than 1.05 times
as long, these are timed once more: the second times count, and the rows have "again".
"""

import contextlib
import dataclasses
import functools
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import typer

from benchmarks import harness, shapes
from benchmarks.harness.machine import measure_ceilings
from benchmarks.ops.bench_grouped_matmul import (
    DTYPE,
    Inputs,
    Programs,
    largest_error,
    start_compiling_inputs,
    start_compiling_pass,
)
from benchmarks.peers.jax_passes import jaxops_passes
from benchmarks.shapes import GroupedShape, models
from jaxops.ops.grouped_matmul import Plan, Problem, Tiles, candidates, make_plan
from jaxops.tuning import current_device, tuned_rows

OURS, TUNED = "jaxops", "tuned"
SETS = {"models": models.DISTS, "random": ("balanced", "skewed")}
MOST = 5  # candidates that are timed beside the plan
AGAIN_ABOVE = 1.05
SHORT = 128  # rows of a mean group up to which the other kernel's tiles are a candidate, too
SMOKE = GroupedShape("unseen_00", 3, 64, 16, 32)


@dataclasses.dataclass
class Case:
    """A pass of a shape.

    Attributes:
      tiles: the plan's, then the candidates', by number.
      programs: compiled with them, by the same numbers.
    """

    shape: GroupedShape
    pass_name: str
    tiles: dict[str, Tiles]
    programs: Programs


def unseen(count: int, seed: int = 20) -> list[GroupedShape]:
    return shapes.random_shapes("unseen", count, seed)


def problem_of(shape: GroupedShape) -> Problem:
    return Problem(shape.G, shape.M, shape.K, shape.N, jnp.dtype(DTYPE).name)


def few(pass_name: str, shape: GroupedShape, planned: Tiles) -> list[Tiles]:
    """The candidates with the plan's kernel and split. Also the plan's tiles without the split and, for short groups,
    the other kernel's choice."""
    problem, device = problem_of(shape), current_device()
    found = candidates(pass_name, problem, device, planned.kernel)
    found = [dataclasses.replace(tiles, split=planned.split) for tiles in found]
    found.append(dataclasses.replace(planned, split=1))
    if shape.M <= SHORT * shape.G:
        other = "pallas" if planned.kernel == "triton" else "triton"
        with contextlib.suppress(NotImplementedError):
            found.append(getattr(make_plan(problem, device, backend=other), pass_name))
    return found


def tiles_of(shape: GroupedShape, pass_name: str) -> list[Tiles]:
    """What is measured, the plan's first; on a CPU nothing else."""
    device, on_gpu = current_device(), harness.on_gpu()
    rows = tuned_rows("grouped_matmul", device)
    plan = make_plan(problem_of(shape), device, rows, backend="auto" if on_gpu else "pallas")
    planned: Tiles = getattr(plan, pass_name)
    return list(dict.fromkeys([planned, *few(pass_name, shape, planned)])) if on_gpu else [planned]


def start(pool: Executor, shape: GroupedShape, pass_name: str) -> Case:
    """Compiles a pass with all its tiles in the pool."""
    tiles = {str(i): each for i, each in enumerate(tiles_of(shape, pass_name))}
    # dgrad alone is the forward of transposed weights, whose tiles are the plan's `fwd`.
    field = "wgrad" if pass_name == "wgrad" else "fwd"
    plans = {number: dataclasses.replace(Plan(each.kernel), **{field: each}) for number, each in tiles.items()}
    passes = {number: jaxops_passes("auto", plan) for number, plan in plans.items()}
    return Case(shape, pass_name, tiles, start_compiling_pass(pool, shape, passes, pass_name))


def ready_side(number: str, case: Case, inputs: Inputs, offsets: np.ndarray) -> harness.Ready:
    program = case.programs[number]
    assert isinstance(program, Future)
    check = functools.partial(largest_error, case.pass_name, case.shape, inputs, offsets)
    return harness.checked(number, program.result(), inputs.args(OURS, offsets), check, tiles=vars(case.tiles[number]))


def measure_case(run: harness.Run, case: Case, inputs: Inputs, dist: str, seed: int) -> None:
    """Times a pass with the plan and the fastest candidates, interleaved, and writes the plan's and the fastest."""
    own, row = "0", harness.case_of("grouped_matmul", case.pass_name, case.shape, DTYPE, dist)
    label, offsets = harness.label_of(row), shapes.group_offsets(shapes.group_sizes(dist, case.shape.G, case.shape.M))
    makers = {number: functools.partial(ready_side, number, case, inputs, offsets) for number in case.programs}
    sides, times = run.time(own, label, makers, MOST)
    if own not in times:
        return
    facts = {"tried": len(makers), "seed": seed}
    slower = lambda: times[own].us_p50 / min(each.us_p50 for each in times.values())
    if slower() > AGAIN_ABOVE:
        times |= run.interleave(sides)
        facts["again"] = True
    both = {OURS: own, TUNED: min(times, key=lambda number: times[number].us_p50)}
    ready = {side: sides[number] for side, number in both.items()}
    found = {side: times[number] for side, number in both.items()}
    run.write(OURS, row, ready, found, "tflops", case.shape.flops, **facts)
    print(f"{label:60} {slower():.3f} times the fastest of {len(makers)}{' | again' * ('again' in facts)}", flush=True)


def main(
    shape_set: str = typer.Option("models", "--shapes", help=f"Of {', '.join(SETS)}."),
    count: int = typer.Option(12, help="How many shapes."),
    seed: int | None = typer.Option(None, help="Of the shapes; by default 20 for random ones, and drawn for models."),
    dists: str = typer.Option("", help=f"Of {', '.join(shapes.DISTS)}; by default those of the shapes."),
    passes: str = typer.Option(",".join(shapes.PASSES)),
    out: str = harness.OUT,
    rounds: int = typer.Option(3),
    work_us: float = typer.Option(10_000, help="Measured microseconds a side and round."),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/unseen_shapes.jsonl; exits with 1 if jaxops itself failed somewhere."""
    (name,) = harness.names(shape_set, SETS)
    own = harness.names(dists, shapes.DISTS) or SETS[name]
    file = harness.begin("unseen_shapes", out, smoke)
    ceilings = measure_ceilings(file, smoke, dtype=DTYPE)
    run = harness.Run(file=file, rounds=rounds, ceiling=ceilings.dense_tflops, peers=[], work_us=work_us)
    if seed is None:
        seed = 20 if name == "random" else int(np.random.default_rng().integers(1 << 16))
    print(f"seed {seed}", flush=True)
    chosen = [SMOKE] if smoke else unseen(count, seed) if name == "random" else models.models(count, seed)
    cases = {}
    with ThreadPoolExecutor(12) as pool:  # all before anything is measured: XLA tunes the checks' products on the GPU
        for shape in chosen:
            start_compiling_inputs(pool, shape)
            cases[shape.name] = [start(pool, shape, pass_name) for pass_name in passes.split(",")]
    run.done("compiling")
    for shape in chosen:
        inputs = Inputs.make(shape)
        for case in cases.pop(shape.name):
            for dist in own:
                measure_case(run, case, inputs, dist, seed)
        del inputs
        run.done(shape.name)
    harness.end(run.left_out)
