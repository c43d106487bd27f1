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

import jaxops
from benchmarks import harness
from benchmarks.harness import checks
from benchmarks.harness.command import Benchmark, command
from benchmarks.shapes import moe as shapes_moe
from benchmarks.shapes.moe import PermuteShape

OPS, PASSES = ("permute", "combine"), ("fwd", "bwd")
DTYPE = "bfloat16"
SMOKE = PermuteShape("smoke", 40, 96, 8, 3)

Named = dict[str, jax.Array]


def make_routing(shape: PermuteShape) -> jaxops.Routing:
    """From random logits: experts get about equal numbers of rows, from tokens in random order."""
    return jax.jit(lambda logits: jaxops.route(logits, shape.k))(harness.normal(0, (shape.T, shape.E), jnp.float32))


def make_inputs(shape: PermuteShape, dtype=DTYPE) -> Named:
    """x, also the cotangent of combine's result, and rows, also the cotangent of permute's."""
    return {
        name: harness.normal(i, (size, shape.D), jnp.dtype(dtype))
        for i, (name, size) in enumerate((("x", shape.T), ("rows", shape.T * shape.k)), 1)
    }


def side(op: str, pass_name: str, backend: str) -> Callable[[Named, jaxops.Routing], Named]:
    """(inputs, routing) -> the results of the pass by name."""

    def permute(inputs: Named, routing: jaxops.Routing) -> Named:
        rows, vjp = jax.vjp(lambda x: jaxops.permute(x, routing, backend=backend), inputs["x"])
        return {"rows": rows} if pass_name == "fwd" else {"dx": vjp(inputs["rows"])[0]}

    def combine(inputs: Named, routing: jaxops.Routing) -> Named:
        def weighted(rows: jax.Array, weights: jax.Array) -> jax.Array:
            return jaxops.combine(rows, dataclasses.replace(routing, weights=weights), backend=backend)

        out, vjp = jax.vjp(weighted, inputs["rows"], routing.weights)
        return {"out": out} if pass_name == "fwd" else dict(zip(("drows", "dweights"), vjp(inputs["x"]), strict=True))

    return permute if op == "permute" else combine


def ready_side(
    name: str, op: str, pass_name: str, inputs: Named, routing: jaxops.Routing, want: Named
) -> harness.Ready:
    args = (inputs, routing)
    check = lambda parts: checks.demand_right(*checks.worst_errors(parts, want), DTYPE)
    return harness.checked(name, harness.compile_fits(side(op, pass_name, name), *args), args, check)


def measure(
    run: harness.Run, shape: PermuteShape, given: tuple[Named, jaxops.Routing], op: str, pass_name: str
) -> None:
    inputs, routing = given
    wide = {name: x.astype(jnp.float32) for name, x in inputs.items()}
    want = jax.jit(side(op, pass_name, "xla"))(wide, routing)
    makers = run.sides("pallas", ready_side, op, pass_name, inputs, routing, want)
    row = harness.case_of(op, pass_name, shape, DTYPE)
    run.measure("pallas", row, makers, "gbps", shape.moved_bytes(op, pass_name))


main = command(
    Benchmark(
        name="permute",
        shapes=shapes_moe.PERMUTES,
        smoke=SMOKE,
        inputs=lambda shape: (make_inputs(shape), make_routing(shape)),
        options={"ops": OPS, "passes": PASSES},
        measure=measure,
        peers="xla",
        ceiling="copy_gbps",
    )
)
