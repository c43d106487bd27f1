"""One grouped_matmul beside a Python loop that reads the offsets on the host and multiplies expert by expert.

python -m benchmarks.bench_expert_loop                        # shapes of 64 experts and more, forward and wgrad
python -m benchmarks.bench_expert_loop --smoke --out /tmp/x   # a tiny shape, CPU too

The loop is what people write first: `offsets = np.asarray(group_offsets)`, then a slice and a product an expert. It
gets compiled programs for every slice, from calls before the clock starts; new offsets would compile again. us_p50 is
the wall time of a call up to its result, host_us the time until the call returns. A `vs` above 1 means that jaxops
takes less time; host_share is jaxops' host_us over the loop's.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benchmarks import checks, harness, shapes
from benchmarks.bench_grouped_matmul import DTYPE, Inputs
from benchmarks.peers_jax import jaxops_passes
from benchmarks.shapes import GroupedShape

OURS, LOOP = "jaxops", "python_loop"
SMOKE = GroupedShape("smoke", 4, 96, 64, 128)
MANY = {name: shape for name, shape in shapes.GROUPED.items() if shape.G >= 64}


def loop_fwd(lhs: jax.Array, rhs: jax.Array, dout: jax.Array, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """[M, N]."""
    bounds = np.asarray(offsets)
    return jnp.concatenate([lhs[start:end] @ rhs[g] for g, (start, end) in enumerate(itertools.pairwise(bounds))])


def loop_wgrad(lhs: jax.Array, rhs: jax.Array, dout: jax.Array, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """[G, K, N]."""
    bounds = np.asarray(offsets)
    return jnp.stack([lhs[start:end].T @ dout[start:end] for start, end in itertools.pairwise(bounds)])


LOOPS = {"fwd": loop_fwd, "wgrad": loop_wgrad}


@dataclasses.dataclass(frozen=True)
class Wall:
    """Microseconds of each call: until it returns, and until its result is there."""

    host: list[float]
    total: list[float]


def wall(call: Callable[[], jax.Array], calls: int) -> Wall:
    found = Wall([], [])
    for _ in range(calls):
        start = time.perf_counter()
        result = call()
        sent = time.perf_counter()
        jax.block_until_ready(result)
        found.host.append(1e6 * (sent - start))
        found.total.append(1e6 * (time.perf_counter() - start))
    return found


def measure_case(run: harness.Run, shape: GroupedShape, pass_name: str, dist: str, inputs: Inputs, calls: int) -> None:
    """Checks both sides, then times them by turns."""
    offsets = shapes.group_offsets(shapes.group_sizes(dist, shape.G, shape.M))
    args, label = inputs.args(OURS, offsets), f"{shape.name} {dist} {pass_name}"
    grouped = jax.jit(jaxops_passes("auto" if harness.on_gpu() else "pallas")[pass_name])
    sides: dict[str, Callable[[], jax.Array]] = {
        OURS: lambda: grouped(*args),
        LOOP: lambda: LOOPS[pass_name](*args),
    }

    def ready_side(name: str) -> harness.Ready:
        tensors = (inputs.lhs, inputs.rhs, inputs.dout)
        errors = checks.grouped_errors(pass_name, shape, sides[name](), tensors, offsets)
        # Not `harness.ready`: to count launches it compiles a side, here the loop with all weights as constants.
        variant = harness.Variant(name, lambda count: wall(sides[name], count).total)
        return harness.Ready(variant, checks.demand_right(*errors, jnp.dtype(DTYPE).name), {})

    ready = run.ready_sides(OURS, label, run.sides(OURS, ready_side))
    walls = {name: Wall([], []) for name in ready}
    for _ in range(run.rounds):
        for name in ready:
            found = wall(sides[name], calls)
            walls[name].host.extend(found.host)
            walls[name].total.extend(found.total)
    times = {name: harness.Times.of(found.total) for name, found in walls.items()}
    host = {name: harness.Times.of(found.host).us_p50 for name, found in walls.items()}
    row = harness.case_of("grouped_matmul", pass_name, shape, DTYPE, dist)
    for name, t in times.items():
        facts = {"host_us": host[name]}
        if name == OURS and LOOP in host:
            facts["host_share"] = host[OURS] / host[LOOP]
        run.write_side(row, name, ready[name], t, harness.ratios(name, times, OURS), "tflops", shape.flops, **facts)
    line = " | ".join(f"{name} {t.us_p50:.0f} us, host {host[name]:.0f}" for name, t in times.items())
    print(f"{label:40}{line}", flush=True)


def main(
    shape_names: str = harness.shapes_option(MANY),
    dists: str = typer.Option("balanced", help=f"Of {', '.join(shapes.DISTS)}; the loop compiles for each length."),
    passes: str = typer.Option(",".join(LOOPS)),
    out: str = harness.OUT,
    rounds: int = typer.Option(3),
    calls: int = typer.Option(10, help="Of each side in a round."),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/expert_loop.jsonl; exits with 1 if jaxops itself failed somewhere."""
    file = harness.begin("expert_loop", out, smoke)
    run = harness.Run(file=file, rounds=rounds, ceiling=harness.write_dense(file, DTYPE, smoke), peers=[LOOP])
    for shape in [SMOKE] if smoke else [MANY[name] for name in shape_names.split(",")]:
        inputs = Inputs.make(shape)
        for pass_name in passes.split(","):
            for dist in dists.split(","):
                measure_case(run, shape, pass_name, dist, inputs, calls)
        run.done(shape.name)
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
