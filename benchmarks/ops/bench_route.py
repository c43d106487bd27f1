"""route: jaxops' kernels beside jnp (top_k, a sort, JAX's gradients), in GB/s beside the copy bandwidth.

python -m benchmarks route                                    # everything: 6 shapes, fwd and fwd+bwd
python -m benchmarks route --shapes dsv3_t32768 --passes fwd --peers ""
python -m benchmarks route --smoke --out /tmp/x               # a tiny shape, every code path, CPU too

A call takes tens of microseconds. Measured is the kernels' time on the device, without the gaps between them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxops
from benchmarks import harness
from benchmarks.harness import checks
from benchmarks.harness.command import Benchmark, command
from benchmarks.shapes import moe as shapes_moe
from benchmarks.shapes.moe import RouteShape

PASSES = ("fwd", "fwd+bwd")
SMOKE = RouteShape("smoke", 40, 16, 3, expert_groups=4, top_expert_groups=2)
# Part of the tokens that choose the same experts in every backend: sums of two scores, which choose the groups, may
# round differently.
LEAST_SAME = 0.999

Named = dict[str, jax.Array]


def make_inputs(shape: RouteShape) -> Named:
    """Logits, the selection bias where there are groups, and the weights' cotangent."""
    inputs = {
        "logits": harness.normal(0, (shape.T, shape.E), jnp.float32),
        "dweights": harness.normal(1, (shape.T, shape.k), jnp.float32),
    }
    return inputs | (
        {"selection_bias": 0.1 * harness.normal(2, (shape.E,), jnp.float32)} if shape.expert_groups > 1 else {}
    )


def side(shape: RouteShape, pass_name: str, backend: str) -> Callable[[Named], Named]:
    """inputs -> the fields of a Routing by name, and dlogits in fwd+bwd."""

    def forward(logits: jax.Array, inputs: Named) -> Named:
        return vars(
            jaxops.route(logits, shape.k, selection_bias=inputs.get("selection_bias"), **shape.options, backend=backend)
        )

    def both(inputs: Named) -> Named:
        def loss(logits):
            parts = forward(logits, inputs)
            weighted = jnp.sum(parts["weights"] * inputs["dweights"])
            return weighted + 0.01 * parts["aux_loss"] + 0.001 * parts["z_loss"], parts

        (_, parts), dlogits = jax.value_and_grad(loss, has_aux=True)(inputs["logits"])
        return parts | {"dlogits": dlogits}

    return both if pass_name == "fwd+bwd" else lambda inputs: forward(inputs["logits"], inputs)


@jax.jit
def right_rows(parts: Named) -> jax.Array:
    """Four booleans: tokens, experts, load and order. Each choice has one row, sorted by expert, then by token."""
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
    """(largest, RMS) error of weights, losses and gradient over their RMS, the worst, of tokens with equal choices.

    Raises:
      ArithmeticError: wrong rows, or other choices than the wanted ones in more than a few tokens.
    """
    found = right_rows(parts)
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


def ready_side(name: str, shape: RouteShape, pass_name: str, inputs: Named, want: Named) -> harness.Ready:
    check = lambda parts: checks.demand_right(*errors(parts, want), "float32")
    return harness.checked(name, harness.compile_fits(side(shape, pass_name, name), inputs), (inputs,), check)


def measure(run: harness.Run, shape: RouteShape, inputs: Named, pass_name: str) -> None:
    want = jax.jit(side(shape, pass_name, "xla"))(inputs)
    makers = run.sides("pallas", ready_side, shape, pass_name, inputs, want)
    row = harness.case_of("route", pass_name, shape, "float32")
    run.measure("pallas", row, makers, "gbps", shape.moved_bytes(pass_name))


main = command(
    Benchmark(
        name="route",
        shapes=shapes_moe.ROUTES,
        smoke=SMOKE,
        inputs=make_inputs,
        options={"passes": PASSES},
        measure=measure,
        peers="xla",
        ceiling="copy_gbps",
    )
)
