"""The router's product in true float32: jaxops' beside XLA's float32 and beside TF32, which is no float32, in GB/s beside the copy bandwidth.

python -m benchmarks.bench_router                                   # everything: 4 shapes, fwd and fwd+bwd
python -m benchmarks.bench_router --smoke --out /tmp/x              # a tiny shape, every code path, CPU too

Rows' max_err and rms_err are those of logits and dkernel beside XLA's float32, over the rows' RMS.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import typer
from jax import lax

from benchmarks import checks, harness, shapes
from benchmarks.shapes import PermuteShape
from jaxops.ops.route import router_logits

PASSES = ("fwd", "fwd+bwd")
SMOKE = PermuteShape("smoke", 40, 24, 8, 2)
LIMITS = {"jaxops": "float32", "xla": "float32", "tf32": "bfloat16"}

Named = dict[str, jax.Array]


@dataclasses.dataclass
class Case:
    shape: PermuteShape
    pass_name: str

    @property
    def label(self) -> str:
        return f"{self.shape.name} {self.pass_name}"

    @property
    def moved_bytes(self) -> int:
        """The tokens, the kernel and the logits, and in the backward the tokens again and the gradients of all."""
        s, times = self.shape, {"fwd": 1, "fwd+bwd": 3}[self.pass_name]
        return times * (2 * s.T * s.D + 4 * s.D * s.E + 4 * s.T * s.E)


def side(case: Case, name: str) -> Callable[[Named], Named]:
    """From inputs to logits, and in fwd+bwd the gradients dx and dkernel."""

    def logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
        if name == "jaxops":
            return router_logits(x, kernel)
        return jnp.matmul(
            x.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST if name == "xla" else lax.Precision.DEFAULT
        )

    def both(inputs: Named) -> Named:
        found, vjp = jax.vjp(logits, inputs["x"], inputs["kernel"])
        dx, dkernel = vjp(inputs["dlogits"])
        return {"logits": found, "dx": dx, "dkernel": dkernel}

    return both if case.pass_name == "fwd+bwd" else lambda inputs: {"logits": logits(inputs["x"], inputs["kernel"])}


def ready_side(name: str, case: Case, inputs: Named, want: Named) -> harness.Ready:
    compiled, seconds = harness.compile_fits(side(case, name), inputs)
    parts = compiled(inputs)
    of_parts = [checks.relative_errors(parts[part], want[part]) for part in ("logits", "dkernel") if part in parts]
    max_err, rms_err = (float(x) for x in jnp.max(jnp.stack(of_parts), axis=0))
    checks.demand_right(max_err, rms_err, LIMITS[name])
    if "dx" in parts:
        of_x = checks.relative_errors(parts["dx"], want["dx"])
        checks.demand_right(float(of_x[0]), float(of_x[1]), "bfloat16")
    ready = harness.ready(name, compiled, (inputs,), sum(part.nbytes for part in parts.values()), max_err)
    ready.facts |= {"compile_s": seconds, "rms_err": rms_err}
    return ready


def measure_case(run: harness.Run, case: Case) -> None:
    """Checks, times and writes every side of one case."""
    s = case.shape
    inputs = {
        "x": harness.normal(0, (s.T, s.D), jnp.bfloat16),
        "kernel": harness.normal(1, (s.D, s.E), jnp.float32) * s.D**-0.5,
        "dlogits": harness.normal(2, (s.T, s.E), jnp.float32),
    }
    want = jax.jit(side(case, "xla"))(inputs)
    ready = run.ready_sides("jaxops", case.label, ready_side, case, inputs, want)
    del want
    times = run.times("jaxops", ready)
    named = {"op": "router", "pass": case.pass_name, "name": s.name, "shape": s.dims, "dtype": "bfloat16", "dist": ""}
    run.write("jaxops", named, ready, times, "gbps", case.moved_bytes, cold=harness.cold(case.moved_bytes))
    print(f"{case.label:32}" + " | ".join(f"{name} {t.us_p50:.1f} us" for name, t in times.items()), flush=True)


def main(
    shape_names: str = typer.Option(
        ",".join(shapes.ROUTERS), "--shapes", help="Comma-separated names from benchmarks/shapes.py."
    ),
    passes: str = typer.Option(",".join(PASSES)),
    peers: str = typer.Option("xla,tf32", help='"" for none.'),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
    rounds: int = typer.Option(5),
    smoke: bool = typer.Option(False, help="A tiny shape, every code path; needs --out."),
) -> None:
    """Appends to <out>/router.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.demand_place(out, smoke)
    file = harness.results_folder(out) / "router.jsonl"
    run = harness.Run(
        file=file,
        rounds=rounds,
        ceiling=harness.write_copy(file, smoke),
        peers=[name for name in peers.split(",") if name],
    )
    for shape in [SMOKE] if smoke else [shapes.ROUTERS[name] for name in shape_names.split(",")]:
        for pass_name in passes.split(","):
            measure_case(run, Case(shape, pass_name))
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
