"""permute and combine: jaxops' kernels beside gathers and sums in jnp, in GB/s beside the copy bandwidth.

python -m benchmarks permute                                    # everything: 3 shapes, both ops, fwd and bwd
python -m benchmarks permute --shapes mixtral_t16384 --ops combine --peers ""
python -m benchmarks permute --smoke --out /tmp/x               # a tiny shape, every code path, CPU too

GB/s count each row once: permute's forward reads each token once and writes its k rows.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import typer

import jaxops
from benchmarks import harness
from benchmarks.harness import checks
from benchmarks.shapes import moe as shapes_moe
from benchmarks.shapes.moe import PermuteShape

OPS, PASSES = ("permute", "combine"), ("fwd", "bwd")
DTYPE = "bfloat16"
SMOKE = PermuteShape("smoke", 40, 96, 8, 3)

Named = dict[str, jax.Array]


@dataclasses.dataclass
class Case:
    shape: PermuteShape
    op: str
    pass_name: str

    @property
    def label(self) -> str:
        return f"{self.shape.name} {self.op} {self.pass_name}"


def make_routing(shape: PermuteShape) -> jaxops.Routing:
    """From random logits: experts get about equal numbers of rows, from tokens in random order."""
    return jax.jit(lambda logits: jaxops.route(logits, shape.k))(harness.normal(0, (shape.T, shape.E), jnp.float32))


def make_inputs(shape: PermuteShape, dtype=DTYPE) -> Named:
    """x, also the cotangent of combine's result, and rows, also the cotangent of permute's."""
    return {
        name: harness.normal(i, (size, shape.D), jnp.dtype(dtype))
        for i, (name, size) in enumerate((("x", shape.T), ("rows", shape.T * shape.k)), 1)
    }


def side(case: Case, backend: str) -> Callable[[Named, jaxops.Routing], Named]:
    """(inputs, routing) -> the results of the pass by name."""

    def permute(inputs: Named, routing: jaxops.Routing) -> Named:
        rows, vjp = jax.vjp(lambda x: jaxops.permute(x, routing, backend=backend), inputs["x"])
        return {"rows": rows} if case.pass_name == "fwd" else {"dx": vjp(inputs["rows"])[0]}

    def combine(inputs: Named, routing: jaxops.Routing) -> Named:
        def weighted(rows: jax.Array, weights: jax.Array) -> jax.Array:
            return jaxops.combine(rows, dataclasses.replace(routing, weights=weights), backend=backend)

        out, vjp = jax.vjp(weighted, inputs["rows"], routing.weights)
        return (
            {"out": out} if case.pass_name == "fwd" else dict(zip(("drows", "dweights"), vjp(inputs["x"]), strict=True))
        )

    return permute if case.op == "permute" else combine


def ready_side(name: str, case: Case, inputs: Named, routing: jaxops.Routing, want: Named) -> harness.Ready:
    args = (inputs, routing)
    check = lambda parts: checks.demand_right(*checks.worst_errors(parts, want), DTYPE)
    return harness.checked(name, harness.compile_fits(side(case, name), *args), args, check)


def measure_case(run: harness.Run, case: Case, inputs: Named, routing: jaxops.Routing) -> None:
    """Checks, times and writes every side of one case."""
    wide = {name: x.astype(jnp.float32) for name, x in inputs.items()}
    want = jax.jit(side(case, "xla"))(wide, routing)
    moved = case.shape.moved_bytes(case.op, case.pass_name)
    row = harness.case_of(case.op, case.pass_name, case.shape, DTYPE)
    makers = run.sides("pallas", ready_side, case, inputs, routing, want)
    run.measure("pallas", case.label, row, makers, "gbps", moved, cold=harness.cold(moved))


def main(
    shape_names: str = harness.shapes_option(shapes_moe.PERMUTES),
    ops: str = typer.Option(",".join(OPS)),
    passes: str = typer.Option(",".join(PASSES)),
    peers: str = typer.Option("xla", help='"" for none.'),
    out: str = harness.OUT,
    rounds: int = typer.Option(5),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/permute.jsonl; exits with 1 if jaxops itself failed somewhere."""
    file = harness.begin("permute", out, smoke)
    run = harness.Run(file=file, rounds=rounds, ceiling=harness.write_copy(file, smoke), peers=harness.names(peers))
    for shape in [SMOKE] if smoke else [shapes_moe.PERMUTES[name] for name in shape_names.split(",")]:
        inputs, routing = make_inputs(shape), make_routing(shape)
        for op in ops.split(","):
            for pass_name in passes.split(","):
                measure_case(run, Case(shape, op, pass_name), inputs, routing)
        run.done(shape.name)
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
