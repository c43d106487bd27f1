"""grouped_matmul at untuned shapes: the tiles that "auto" chooses beside all candidates of tuning that shape.

python -m benchmarks unseen_shapes                              # 20 random shapes, three passes
python -m benchmarks unseen_shapes --shapes 5 --passes fwd
python -m benchmarks unseen_shapes --smoke --out /tmp/x         # a tiny shape, every code path, CPU too

Rows of op grouped_matmul, named unseen_00 and so on. Side jaxops is the plan of "auto", side tuned the candidate that
is the fastest over an even and a Zipf split. A `vs` of 0.9 means that the plan of "auto" takes 1.11 times as long.
"""

import dataclasses
import functools
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import typer

from benchmarks import harness, shapes
from benchmarks.harness.machine import measure_ceilings
from benchmarks.ops.bench_grouped_matmul import DTYPE, Inputs, Programs, largest_error, start_compiling_pass
from benchmarks.peers.jax_passes import jaxops_passes
from benchmarks.shapes import GroupedShape
from jaxops.ops.grouped_matmul import Plan, Problem, Tiles, candidates, make_plan
from jaxops.tuning import current_device, tuned_rows

OURS, TUNED = "jaxops", "tuned"
DISTS = ("balanced", "skewed")
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


def unseen(count: int) -> list[GroupedShape]:
    return shapes.random_shapes("unseen", count, 20)


def problem_of(shape: GroupedShape) -> Problem:
    return Problem(shape.G, shape.M, shape.K, shape.N, jnp.dtype(DTYPE).name)


def few(pass_name: str, shape: GroupedShape, planned: Tiles) -> list[Tiles]:
    """The candidates with the plan's kernel and panel: panels gain a few percent, and each costs a compilation."""
    found = candidates(pass_name, problem_of(shape), current_device(), planned.kernel)
    return [tiles for tiles in found if tiles.panel == planned.panel]


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


def measure_case(run: harness.Run, case: Case, inputs: Inputs) -> None:
    """Times all tiles of a pass, interleaved, and writes the plan's and the fastest."""
    own, sides, times = "0", {}, {}
    for dist in DISTS:
        offsets = shapes.group_offsets(shapes.group_sizes(dist, case.shape.G, case.shape.M))
        label = f"{case.shape.name} {'x'.join(map(str, case.shape.dims.values()))} {dist} {case.pass_name}"
        makers = {number: functools.partial(ready_side, number, case, inputs, offsets) for number in case.programs}
        sides[dist], times[dist] = run.time(own, label, makers)
    measured = [number for number in case.programs if all(number in times[dist] for dist in DISTS)]
    if own not in measured:
        return
    best = min(measured, key=lambda number: float(np.prod([times[dist][number].us_p50 for dist in DISTS])))
    for dist in DISTS:
        row = harness.case_of("grouped_matmul", case.pass_name, case.shape, DTYPE, dist)
        both = {OURS: own, TUNED: best}
        found = {side: times[dist][number] for side, number in both.items()}
        ready = {side: sides[dist][number] for side, number in both.items()}
        run.write(OURS, row, ready, found, "tflops", case.shape.flops, tried=len(measured))
        slower = found[OURS].us_p50 / found[TUNED].us_p50
        print(
            f"{case.shape.name} {case.pass_name} {dist}: {slower:.3f} times the fastest of {len(measured)}", flush=True
        )


def main(
    count: int = typer.Option(20, "--shapes", help="How many of the random shapes."),
    passes: str = typer.Option(",".join(shapes.PASSES)),
    out: str = harness.OUT,
    rounds: int = typer.Option(3),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/unseen_shapes.jsonl; exits with 1 if jaxops itself failed somewhere."""
    file = harness.begin("unseen_shapes", out, smoke)
    ceilings = measure_ceilings(file, smoke, dtype=DTYPE)
    run = harness.Run(file=file, rounds=rounds, ceiling=ceilings.dense_tflops, peers=[])
    chosen = [SMOKE] if smoke else unseen(count)
    with ThreadPoolExecutor(12) as pool:  # all before anything is measured: XLA tunes the checks' products on the GPU
        cases = {shape.name: [start(pool, shape, pass_name) for pass_name in passes.split(",")] for shape in chosen}
    for shape in chosen:
        inputs = Inputs.make(shape)
        for case in cases.pop(shape.name):
            measure_case(run, case, inputs)
        del inputs
        run.done(shape.name)
    harness.end(run.left_out)
