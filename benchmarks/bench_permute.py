"""Rows of tokens to their experts and back: jaxops' kernels beside the same in jnp (gathers and sums), in GB/s beside the copy bandwidth.

python -m benchmarks.bench_permute                                    # everything: 3 shapes, both ops, fwd and bwd
python -m benchmarks.bench_permute --shapes mixtral_t16384 --ops combine --peers ""
python -m benchmarks.bench_permute --smoke --out /tmp/x               # a tiny shape, every code path, CPU too

GB/s count each row once: permute's forward reads a token and writes its k rows, and that is what a token costs however often it is read.
"""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import typer

import jaxops
from benchmarks import checks, harness, shapes
from benchmarks.shapes import PermuteShape

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
    """Of random logits: experts get about as many rows each, in no order of the tokens."""
    return jax.jit(lambda logits: jaxops.route(logits, shape.k))(harness.normal(0, (shape.T, shape.E), jnp.float32))


def make_inputs(shape: PermuteShape, dtype=DTYPE) -> Named:
    """x, which is also the cotangent of combine's result, and rows, which are also that of permute's."""
    return {
        name: harness.normal(i, (size, shape.D), jnp.dtype(dtype))
        for i, (name, size) in enumerate((("x", shape.T), ("rows", shape.T * shape.k)), 1)
    }


def side(case: Case, backend: str) -> Callable[[Named, jaxops.Routing], Named]:
    """From inputs to what the pass gives, by name."""

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


@jax.jit
def _errors(parts: Named, want: Named) -> jax.Array:
    return jnp.max(
        jnp.stack([checks.relative_errors(parts[name], want[name]) for name in want]), axis=0
    )  # max passes NaN on


def errors(parts: Named, want: Named) -> tuple[float, float]:
    """(largest, RMS) error of each row over its RMS, the worst of all rows of all parts."""
    max_err, rms_err = _errors(parts, want)
    return float(max_err), float(rms_err)


def ready_side(name: str, case: Case, inputs: Named, routing: jaxops.Routing, want: Named) -> harness.Ready:
    compiled, seconds = harness.compile_fits(side(case, name), inputs, routing)
    parts = compiled(inputs, routing)
    max_err, rms_err = errors(parts, want)
    checks.demand_right(max_err, rms_err, DTYPE)
    ready = harness.ready(name, compiled, (inputs, routing), sum(part.nbytes for part in parts.values()), max_err)
    ready.facts["compile_s"] = seconds
    return ready


def measure_case(run: harness.Run, case: Case, inputs: Named, routing: jaxops.Routing) -> None:
    """Checks, times and writes every side of one case."""
    want = jax.jit(
        lambda inputs, routing: side(case, "xla")({name: x.astype(jnp.float32) for name, x in inputs.items()}, routing)
    )(inputs, routing)
    ready = run.ready_sides("pallas", case.label, ready_side, case, inputs, routing, want)
    del want
    times = run.times("pallas", ready)
    moved = case.shape.moved_bytes(case.op, case.pass_name)
    named = {
        "op": case.op,
        "pass": case.pass_name,
        "name": case.shape.name,
        "shape": case.shape.dims,
        "dtype": DTYPE,
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
        ",".join(shapes.PERMUTES), "--shapes", help="Comma-separated names from benchmarks/shapes.py."
    ),
    ops: str = typer.Option(",".join(OPS)),
    passes: str = typer.Option(",".join(PASSES)),
    peers: str = typer.Option("xla", help='"" for none.'),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
    rounds: int = typer.Option(5),
    smoke: bool = typer.Option(False, help="A tiny shape, every code path; needs --out."),
) -> None:
    """Appends to <out>/permute.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.demand_place(out, smoke)
    start = time.perf_counter()
    file = harness.results_folder(out) / "permute.jsonl"
    run = harness.Run(
        file=file,
        rounds=rounds,
        ceiling=harness.write_copy(file, smoke),
        peers=[name for name in peers.split(",") if name],
    )
    for shape in [SMOKE] if smoke else [shapes.PERMUTES[name] for name in shape_names.split(",")]:
        inputs, routing = make_inputs(shape), make_routing(shape)
        for op in ops.split(","):
            for pass_name in passes.split(","):
                measure_case(run, Case(shape, op, pass_name), inputs, routing)
    print(f"done after {time.perf_counter() - start:.0f} s", flush=True)
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
