"""grouped_matmul at untuned shapes: the plan that "auto" chooses beside the best plan of tuning that shape.

python -m benchmarks.bench_unseen_shapes                              # 20 random shapes, three passes
python -m benchmarks.bench_unseen_shapes --shapes 5 --passes fwd
python -m benchmarks.bench_unseen_shapes --smoke --out /tmp/x         # a tiny shape, every code path, CPU too

Rows of op grouped_matmul, named unseen_00 and so on. Side jaxops is the plan of "auto", side tuned the fastest
candidate over an even and a Zipf split. A `vs` of 0.9 means that the plan of "auto" takes 1.11 times as long as the
tuned one.
"""

import dataclasses
import time

import jax.numpy as jnp
import numpy as np
import typer

from benchmarks import checks, harness, shapes
from benchmarks.bench_grouped_matmul import DTYPE, Inputs
from benchmarks.peers_jax import jaxops_passes
from benchmarks.shapes import GroupedShape
from jaxops import tuning
from jaxops.ops.grouped_matmul import Plan, Problem, Tiles, candidates, make_plan
from jaxops.tuning import current_device, tuned_rows

OURS, TUNED = "jaxops", "tuned"
DISTS = ("balanced", "skewed")
SMOKE = GroupedShape("unseen_00", 3, 64, 16, 32)


def unseen(count: int) -> list[GroupedShape]:
    return shapes.random_shapes("unseen", count, 20)


def problem_of(shape: GroupedShape) -> Problem:
    return Problem(shape.G, shape.M, shape.K, shape.N, jnp.dtype(DTYPE).name)


def few(pass_name: str, shape: GroupedShape, planned: Tiles) -> list[Tiles]:
    """The candidates with the plan's kernel and panel: panels gain a few percent, and each costs a compilation."""
    found = candidates(pass_name, problem_of(shape), current_device(), planned.kernel)
    return [tiles for tiles in found if tiles.panel == planned.panel]


def tuned(pass_name: str, shape: GroupedShape, plan: Plan) -> tuple[Tiles | None, float]:
    """(the fastest tiles of a pass, seconds of tuning)."""
    planned: Tiles | None = getattr(plan, pass_name)
    if not harness.on_gpu() or planned is None:
        return planned, 0.0
    start = time.perf_counter()
    rows = tuning.tune(problem_of(shape), [pass_name], tiles=few(pass_name, shape, planned), say=lambda line: None)
    return Tiles(**min(rows, key=lambda row: row["us"])["tiles"]), time.perf_counter() - start


def ready_side(
    side: str, shape: GroupedShape, pass_name: str, chosen: dict[str, Tiles | None], inputs: Inputs, offsets: np.ndarray
) -> harness.Ready:
    tiles, args = chosen[side], inputs.args(side, offsets)
    # dgrad alone is the forward of transposed weights, whose tiles are the plan's `fwd`.
    name = "wgrad" if pass_name == "wgrad" else "fwd"
    plan = Plan("xla") if tiles is None else dataclasses.replace(Plan(tiles.kernel), **{name: tiles})
    tensors = (inputs.lhs, inputs.rhs, inputs.dout)

    def check(out) -> float:
        errors = checks.grouped_errors(pass_name, shape, out, tensors, offsets)
        return checks.demand_right(*errors, jnp.dtype(DTYPE).name)

    compiled = harness.compile_fits(jaxops_passes("auto", plan)[pass_name], *args)
    return harness.checked(side, compiled, args, check, tiles=None if tiles is None else vars(tiles))


def measure_case(run: harness.Run, shape: GroupedShape, pass_name: str, inputs: Inputs) -> None:
    """Tunes one pass of a shape, then times the plan's tiles and the tuned ones, interleaved."""
    device = current_device()
    backend = "auto" if harness.on_gpu() else "pallas"
    plan = make_plan(problem_of(shape), device, tuned_rows("grouped_matmul", device), backend=backend)
    best, seconds = tuned(pass_name, shape, plan)
    chosen = {OURS: getattr(plan, pass_name), TUNED: best}
    for dist in DISTS:
        offsets = shapes.group_offsets(shapes.group_sizes(dist, shape.G, shape.M))
        label = f"{shape.name} {'x'.join(map(str, shape.dims.values()))} {dist} {pass_name}"
        row = harness.case_of("grouped_matmul", pass_name, shape, DTYPE, dist)
        makers = run.sides(OURS, ready_side, shape, pass_name, chosen, inputs, offsets)
        run.measure(OURS, label, row, makers, "tflops", shape.flops, tuning_s=seconds)


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
    for shape in [SMOKE] if smoke else unseen(count):
        inputs = Inputs.make(shape)
        for pass_name in passes.split(","):
            measure_case(run, shape, pass_name, inputs)
        run.done(shape.name)
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
