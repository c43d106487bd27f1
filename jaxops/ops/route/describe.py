"""What tools and tests ask of route."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops._lib.planning.description import Description, Function, Given, Tuning, in_float32, names
from jaxops.ops.route.api import route, route_choices, update_router_bias
from jaxops.ops.route.plan import PLANNER, Problem, Spec
from jaxops.ops.route.reference import choices_reference, route_reference


def _reference(a: Given) -> Any:
    T, k = a["logits"].shape[0], a["k"]
    groups = a["expert_groups"], a["top_expert_groups"]
    capacity = None if a["capacity"] is None or a["capacity"] >= T else a["capacity"]
    spec = Spec(k, a["score"], a["normalize"], a["weight_scale"], *groups, capacity)
    if not T:
        return in_float32(route, a)  # the reference's losses are means of nothing
    return route_reference(spec, a["logits"], a["selection_bias"], a["mask"])


_CHOICES = ("experts", "weights", "num_experts", "mask", "logits", "score")


class _Tuning(Tuning):
    """bwd is measured with the forward. Logits are float32; a token has up to 8 choices."""

    planner, problem, shape, unit = PLANNER, Problem, ("T", "E"), "gbps"

    def tensors(self, problem):
        """Logits whose scores differ by more than rounding: each backend makes the same choices."""
        steps = jnp.broadcast_to(jnp.arange(problem.E) * (8 / problem.E), (problem.T, problem.E))
        return jax.random.permutation(jax.random.key(0), steps.astype(jnp.float32), axis=1, independent=True)

    def run(self, name, problem, plan, logits):
        def forward(logits):
            return route(logits, min(8, problem.E), plan=plan)

        if name == "fwd":
            return [jnp.atleast_1d(leaf) for leaf in jax.tree.leaves(forward(logits))]

        def floats(logits):
            routing = forward(logits)
            return routing.weights, routing.aux_loss, routing.z_loss

        out, vjp = jax.vjp(floats, logits)
        cotangents = jax.random.normal(jax.random.key(1), out[0].shape), jnp.float32(1), jnp.float32(1)
        return vjp(cotangents)

    def work(self, name, problem, *operands):
        return problem.T * problem.E * 4 * {"fwd": 1, "bwd": 3}[name]


DESCRIPTION = Description(
    functions=(
        Function(
            route,
            residuals=names("route", "routing"),
            wrt=("logits",),
            reference=_reference,
            reference_bytes=lambda a: 4 * a["k"] * a["logits"].size,
            problem=Problem(16384, 64),
        ),
        Function(
            route_choices,
            residuals=names("route", "routing"),
            wrt=("weights", "logits"),
            reference=lambda a: choices_reference(*(a[name] for name in _CHOICES)),
            reference_bytes=lambda a: 8 * a["num_experts"] * a["experts"].size,
            problem=Problem(16384, 64),
        ),
        Function(update_router_bias),
    ),
    tuning=_Tuning(),
)
