"""The router's float32 product: jaxops' beside XLA's in float32 and in TF32, in GB/s beside the copy bandwidth.

python -m benchmarks router                                   # everything: 4 shapes, fwd and fwd+bwd
python -m benchmarks router --smoke --out /tmp/x              # a tiny shape, every code path, CPU too

Rows' max_err and rms_err are those of logits and dkernel against XLA's float32, over the rows' RMS.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import typer
from jax import lax

from benchmarks import harness
from benchmarks.harness import checks
from benchmarks.shapes import moe as shapes_moe
from benchmarks.shapes.moe import PermuteShape
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
        """Tokens, kernel and logits; with the backward the tokens again and all gradients."""
        s, times = self.shape, {"fwd": 1, "fwd+bwd": 3}[self.pass_name]
        return times * (2 * s.T * s.D + 4 * s.D * s.E + 4 * s.T * s.E)


def side(case: Case, name: str) -> Callable[[Named], Named]:
    """inputs -> logits, and in fwd+bwd the gradients dx and dkernel."""

    def logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
        if name == "jaxops":
            return router_logits(x, kernel)
        precision = lax.Precision.HIGHEST if name == "xla" else lax.Precision.DEFAULT
        return jnp.matmul(x.astype(jnp.float32), kernel, precision=precision)

    def both(inputs: Named) -> Named:
        found, vjp = jax.vjp(logits, inputs["x"], inputs["kernel"])
        dx, dkernel = vjp(inputs["dlogits"])
        return {"logits": found, "dx": dx, "dkernel": dkernel}

    return both if case.pass_name == "fwd+bwd" else lambda inputs: {"logits": logits(inputs["x"], inputs["kernel"])}


def ready_side(name: str, case: Case, inputs: Named, want: Named) -> harness.Ready:
    facts = {}

    def check(parts: Named) -> float:
        errors = {part: checks.relative_errors(parts[part], want[part]) for part in parts}
        if "dx" in errors:
            of_x = errors.pop("dx")
            checks.demand_right(float(of_x[0]), float(of_x[1]), "bfloat16")
        max_err, facts["rms_err"] = (float(x) for x in jnp.max(jnp.stack(list(errors.values())), axis=0))
        return checks.demand_right(max_err, facts["rms_err"], LIMITS[name])

    ready = harness.checked(name, harness.compile_fits(side(case, name), inputs), (inputs,), check)
    ready.facts |= facts
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
    row = harness.case_of("router", case.pass_name, s, "bfloat16")
    makers, moved = run.sides("jaxops", ready_side, case, inputs, want), case.moved_bytes
    run.measure("jaxops", case.label, row, makers, "gbps", moved, cold=harness.cold(moved))


def main(
    shape_names: str = harness.shapes_option(shapes_moe.ROUTERS),
    passes: str = typer.Option(",".join(PASSES)),
    peers: str = typer.Option("xla,tf32", help='"" for none.'),
    out: str = harness.OUT,
    rounds: int = typer.Option(5),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/router.jsonl; exits with 1 if jaxops itself failed somewhere."""
    file = harness.begin("router", out, smoke)
    run = harness.Run(file=file, rounds=rounds, ceiling=harness.write_copy(file, smoke), peers=harness.names(peers))
    for shape in [SMOKE] if smoke else [shapes_moe.ROUTERS[name] for name in shape_names.split(",")]:
        for pass_name in passes.split(","):
            measure_case(run, Case(shape, pass_name))
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
