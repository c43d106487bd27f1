"""Routing: jaxops' kernels beside the same in jnp (top_k, a sort, JAX's gradients), in microseconds, and in GB/s beside the copy bandwidth.

python -m benchmarks.bench_route                                    # everything: 6 shapes, fwd and fwd+bwd
python -m benchmarks.bench_route --shapes dsv3_t32768 --passes fwd --peers ""
python -m benchmarks.bench_route --smoke --out /tmp/x               # a tiny shape, every code path, CPU too

At these sizes a call takes tens of microseconds: what is measured is the kernels' time on the device, without the gaps between them.
"""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import typer

import jaxops
from benchmarks import checks, harness, shapes
from benchmarks.shapes import RouteShape

PASSES = ("fwd", "fwd+bwd")
SMOKE = RouteShape("smoke", 40, 16, 3, expert_groups=4, top_expert_groups=2)
LEAST_SAME = 0.999  # tokens that choose the same in every backend: the sums of two scores, by which a group is chosen, may round to the other one

Named = dict[str, jax.Array]


@dataclasses.dataclass
class Case:
    shape: RouteShape
    pass_name: str

    @property
    def label(self) -> str:
        return f"{self.shape.name} {self.pass_name}"


def make_inputs(shape: RouteShape) -> Named:
    """Logits, the selection bias where there are groups, and the weights' cotangent."""
    inputs = {
        "logits": harness.normal(0, (shape.T, shape.E), jnp.float32),
        "dweights": harness.normal(1, (shape.T, shape.k), jnp.float32),
    }
    return inputs | (
        {"selection_bias": 0.1 * harness.normal(2, (shape.E,), jnp.float32)} if shape.expert_groups > 1 else {}
    )


def side(case: Case, backend: str) -> Callable[[Named], Named]:
    """From inputs to the parts of a Routing by name, and dlogits in fwd+bwd."""

    def forward(logits: jax.Array, inputs: Named) -> Named:
        return vars(
            jaxops.route(
                logits, case.shape.k, selection_bias=inputs.get("selection_bias"), **case.shape.options, backend=backend
            )
        )

    def both(inputs: Named) -> Named:
        def loss(logits):
            parts = forward(logits, inputs)
            return jnp.sum(parts["weights"] * inputs["dweights"]) + 0.01 * parts["aux_loss"] + 0.001 * parts[
                "z_loss"
            ], parts

        (_, parts), dlogits = jax.value_and_grad(loss, has_aux=True)(inputs["logits"])
        return parts | {"dlogits": dlogits}

    return both if case.pass_name == "fwd+bwd" else lambda inputs: forward(inputs["logits"], inputs)


@jax.jit
def places_are_right(parts: Named) -> jax.Array:
    """Whether the rows are the tokens' choices, each once, sorted by expert and within an expert by token: four booleans."""
    T, k = parts["experts"].shape
    positions, offsets = parts["row_positions"], parts["group_offsets"]
    token = jnp.broadcast_to(jnp.arange(T)[:, None], (T, k))
    row = jnp.arange(T * k)
    expert_of_row = jnp.searchsorted(offsets, row, side="right") - 1
    inside_an_expert = expert_of_row[1:] == expert_of_row[:-1]
    tests = (
        jnp.all(parts["row_indices"][positions] == token),
        jnp.all(expert_of_row[positions] == parts["experts"]),
        jnp.all(jnp.diff(offsets) == parts["load"]),
        jnp.all(jnp.where(inside_an_expert, jnp.diff(parts["row_indices"]) > 0, True)),
    )
    return jnp.stack(tests)


def errors(parts: Named, want: Named) -> tuple[float, float]:
    """(largest, RMS) error of weights, losses and gradient over each one's RMS, the worst of them; of the tokens that chose the same.

    Raises:
      ArithmeticError: rows in wrong places, or choices that differ from the wanted ones in more than a few tokens.
    """
    found = places_are_right(parts)
    if not bool(jnp.all(found)):
        raise ArithmeticError(f"wrong result: tokens, experts, load, order of the rows are right: {found.tolist()}")
    same = jnp.all(parts["experts"] == want["experts"], axis=1)
    if float(jnp.mean(same)) < LEAST_SAME:
        raise ArithmeticError(f"wrong result: only {float(jnp.mean(same)):.4f} of the tokens chose the same experts")
    of_parts = []
    for name in ("weights", "dlogits", "aux_loss", "z_loss"):
        if name in want:
            rows = same[:, None] if want[name].ndim else True
            got, wanted = (jnp.where(rows, values[name], 0).reshape(1, -1) for values in (parts, want))
            of_parts.append(checks.relative_errors(got, wanted))
    max_err, rms_err = jnp.max(jnp.stack(of_parts), axis=0)  # passes NaN on
    return float(max_err), float(rms_err)


def ready_side(name: str, case: Case, inputs: Named, want: Named) -> harness.Ready:
    compiled, seconds = harness.compile_fits(side(case, name), inputs)
    parts = compiled(inputs)
    max_err, rms_err = errors(parts, want)
    checks.demand_right(max_err, rms_err, "float32")
    ready = harness.ready(name, compiled, (inputs,), sum(part.nbytes for part in parts.values()), max_err)
    ready.facts["compile_s"] = seconds
    return ready


def measure_case(run: harness.Run, case: Case, inputs: Named) -> None:
    """Checks, times and writes every side of one case."""
    want = jax.jit(side(case, "xla"))(inputs)
    ready = run.ready_sides("pallas", case.label, ready_side, case, inputs, want)
    del want
    times = run.times("pallas", ready)
    moved = case.shape.moved_bytes(case.pass_name)
    named = {
        "op": "route",
        "pass": case.pass_name,
        "name": case.shape.name,
        "shape": case.shape.dims,
        "dtype": "float32",
        "dist": "",
    }
    run.write("pallas", named, ready, times, "gbps", moved, cold=harness.cold(moved))
    print(
        f"{case.label:32}"
        + " | ".join(f"{name} {t.us_p50:.1f} us {moved / t.us_p50 / 1e3:.0f} GB/s" for name, t in times.items()),
        flush=True,
    )


def main(
    shape_names: str = typer.Option(
        ",".join(shapes.ROUTES), "--shapes", help="Comma-separated names from benchmarks/shapes.py."
    ),
    passes: str = typer.Option(",".join(PASSES)),
    peers: str = typer.Option("xla", help='"" for none.'),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
    rounds: int = typer.Option(5),
    smoke: bool = typer.Option(False, help="A tiny shape, every code path; needs --out."),
) -> None:
    """Appends to <out>/route.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.demand_place(out, smoke)
    start = time.perf_counter()
    file = harness.results_folder(out) / "route.jsonl"
    run = harness.Run(
        file=file,
        rounds=rounds,
        ceiling=harness.write_copy(file, smoke),
        peers=[name for name in peers.split(",") if name],
    )
    for shape in [SMOKE] if smoke else [shapes.ROUTES[name] for name in shape_names.split(",")]:
        inputs = make_inputs(shape)
        for pass_name in passes.split(","):
            measure_case(run, Case(shape, pass_name), inputs)
    print(f"done after {time.perf_counter() - start:.0f} s", flush=True)
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
