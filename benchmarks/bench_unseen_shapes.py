"""grouped_matmul at untuned shapes: the tiles that "auto" chooses beside all candidates of tuning that shape.

python -m benchmarks.bench_unseen_shapes                              # 20 random shapes, three passes
python -m benchmarks.bench_unseen_shapes --shapes 5 --passes fwd
python -m benchmarks.bench_unseen_shapes --smoke --out /tmp/x         # a tiny shape, every code path, CPU too

Rows of op grouped_matmul, named unseen_00 and so on. Side jaxops is the plan of "auto", side tuned the candidate that
is the fastest over an even and a Zipf split. A `vs` of 0.9 means that the plan of "auto" takes 1.11 times as long.
"""

import dataclasses
import functools
import itertools
from concurrent.futures import Future, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import typer

from benchmarks import checks, harness, shapes
from benchmarks.bench_grouped_matmul import DTYPE, Inputs, Programs, start_compiling
from benchmarks.peers_jax import jaxops_passes
from benchmarks.shapes import GroupedShape
from jaxops.ops.grouped_matmul import Plan, Problem, Tiles, candidates, make_plan
from jaxops.tuning import current_device, tuned_rows

OURS, TUNED = "jaxops", "tuned"
DISTS = ("balanced", "skewed")
SMOKE = GroupedShape("unseen_00", 3, 64, 16, 32)


@dataclasses.dataclass
class Case:
    """A pass of a shape; tiles are the plan's, then the candidates'. programs are named by their number."""

    shape: GroupedShape
    pass_name: str
    tiles: list[Tiles]
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
    device = current_device()
    backend = "auto" if harness.on_gpu() else "pallas"
    plan = make_plan(problem_of(shape), device, tuned_rows("grouped_matmul", device), backend=backend)
    planned: Tiles = getattr(plan, pass_name)
    return list(dict.fromkeys([planned, *(few(pass_name, shape, planned) if harness.on_gpu() else [])]))


def passes_of(tiles: Tiles, pass_name: str):
    # dgrad alone is the forward of transposed weights, whose tiles are the plan's `fwd`.
    return jaxops_passes(
        "auto", dataclasses.replace(Plan(tiles.kernel), **{"wgrad" if pass_name == "wgrad" else "fwd": tiles})
    )


def ready_side(number: str, case: Case, inputs: Inputs, offsets: np.ndarray) -> harness.Ready:
    program, args = case.programs[number], inputs.args(OURS, offsets)
    assert isinstance(program, Future)

    def check(out) -> float:
        tensors = (inputs.lhs, inputs.rhs, inputs.dout)
        errors = checks.grouped_errors(case.pass_name, case.shape, out, tensors, offsets)
        return checks.demand_right(*errors, jnp.dtype(DTYPE).name)

    return harness.checked(number, program.result(), args, check, tiles=vars(case.tiles[int(number)]))


def measure_case(run: harness.Run, case: Case, inputs: Inputs) -> None:
    """Times all tiles of a pass, interleaved, and writes the plan's and the fastest."""
    own, sides, times = "0", {}, {}
    for dist in DISTS:
        offsets = shapes.group_offsets(shapes.group_sizes(dist, case.shape.G, case.shape.M))
        label = f"{case.shape.name} {'x'.join(map(str, case.shape.dims.values()))} {dist} {case.pass_name}"
        makers = {number: functools.partial(ready_side, number, case, inputs, offsets) for number in case.programs}
        sides[dist] = run.ready_sides(own, label, makers)
        times[dist] = harness.interleave([side.variant for side in sides[dist].values()], run.rounds)
        run.left_out += own in sides[dist] and own not in times[dist]
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
    run = harness.Run(file=file, rounds=rounds, ceiling=harness.write_dense(file, DTYPE, smoke), peers=[TUNED])
    with ThreadPoolExecutor(12) as pool:  # compiles the next cases while one is measured
        cases = []
        for shape, pass_name in itertools.product([SMOKE] if smoke else unseen(count), passes.split(",")):
            tiles = tiles_of(shape, pass_name)
            sides = {str(i): passes_of(each, pass_name) for i, each in enumerate(tiles)}
            cases.append(Case(shape, pass_name, tiles, start_compiling(pool, shape, sides, pass_name)))
        for _, own in itertools.groupby(cases, key=lambda case: case.shape.name):
            of_shape = list(own)
            inputs = Inputs.make(of_shape[0].shape)
            for case in of_shape:
                measure_case(run, case, inputs)
                case.programs.clear()
            del inputs
            run.done(of_shape[0].shape.name)
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
