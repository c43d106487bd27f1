"""The router's float32 product: jaxops' beside XLA's in float32 and in TF32, in GB/s beside the copy bandwidth.

python -m benchmarks router                                   # everything: 4 shapes, fwd and fwd+bwd
python -m benchmarks router --smoke --out /tmp/x              # a tiny shape, every code path, CPU too

Rows' max_err and rms_err are those of logits and dkernel against XLA's float32, over the rows' RMS.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import harness
from benchmarks.harness import checks
from benchmarks.harness.command import Benchmark, command
from benchmarks.shapes import moe as shapes_moe
from benchmarks.shapes.moe import PermuteShape
from jaxops.ops.route import router_logits

PASSES = ("fwd", "fwd+bwd")
SMOKE = PermuteShape("smoke", 40, 24, 8, 2)
LIMITS = {"jaxops": "float32", "xla": "float32", "tf32": "bfloat16"}

Named = dict[str, jax.Array]


def moved_bytes(shape: PermuteShape, pass_name: str) -> int:
    """Tokens, kernel and logits; with the backward the tokens again and all gradients."""
    s, times = shape, {"fwd": 1, "fwd+bwd": 3}[pass_name]
    return times * (2 * s.T * s.D + 4 * s.D * s.E + 4 * s.T * s.E)


def make_inputs(shape: PermuteShape) -> Named:
    return {
        "x": harness.normal(0, (shape.T, shape.D), jnp.bfloat16),
        "kernel": harness.normal(1, (shape.D, shape.E), jnp.float32) * shape.D**-0.5,
        "dlogits": harness.normal(2, (shape.T, shape.E), jnp.float32),
    }


def side(pass_name: str, name: str) -> Callable[[Named], Named]:
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

    return both if pass_name == "fwd+bwd" else lambda inputs: {"logits": logits(inputs["x"], inputs["kernel"])}


def ready_side(name: str, pass_name: str, inputs: Named, want: Named) -> harness.Ready:
    facts = {}

    def check(parts: Named) -> float:
        errors = {part: checks.relative_errors(parts[part], want[part]) for part in parts}
        if "dx" in errors:
            of_x = errors.pop("dx")
            checks.demand_right(float(of_x[0]), float(of_x[1]), "bfloat16")
        max_err, facts["rms_err"] = (float(x) for x in jnp.max(jnp.stack(list(errors.values())), axis=0))
        return checks.demand_right(max_err, facts["rms_err"], LIMITS[name])

    ready = harness.checked(name, harness.compile_fits(side(pass_name, name), inputs), (inputs,), check)
    ready.facts |= facts
    return ready


def measure(run: harness.Run, shape: PermuteShape, inputs: Named, pass_name: str) -> None:
    want = jax.jit(side(pass_name, "xla"))(inputs)
    makers = run.sides("jaxops", ready_side, pass_name, inputs, want)
    row = harness.case_of("router", pass_name, shape, "bfloat16")
    run.measure("jaxops", row, makers, "gbps", moved_bytes(shape, pass_name))


main = command(
    Benchmark(
        name="router",
        shapes=shapes_moe.ROUTERS,
        smoke=SMOKE,
        inputs=make_inputs,
        options={"passes": PASSES},
        measure=measure,
        peers="xla,tf32",
        ceiling="copy_gbps",
    )
)
