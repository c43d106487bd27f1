"""What tools and tests ask of permute and combine."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxops._lib.planning.description import Description, Function, Tuning, names, random
from jaxops.ops.permute.api import combine, permute
from jaxops.ops.permute.plan import PLANNER, Problem
from jaxops.ops.permute.reference import combine_reference, permute_reference
from jaxops.ops.route import route


class _Tuning(Tuning):
    planner, problem, shape, unit = PLANNER, Problem, ("T", "D", "k"), "gbps"

    def tensors(self, problem):
        """x, the rows of the choices, and a routing of random logits."""
        p = problem
        logits = random(2, (p.T, max(8, 4 * p.k)), "float32")
        return random(0, (p.T, p.D), p.dtype), random(1, (p.T * p.k, p.D), p.dtype), route(logits, p.k)

    def operands(self, name, problem, tensors, offsets):
        x, rows, routing = tensors
        return {"permute": (x, routing), "combine": (rows, routing), "combine_bwd": (rows, routing, x)}[name]

    def run(self, name, problem, plan, rows, routing, *dout):
        if name == "permute":
            return permute(rows, routing, plan=plan)

        def weighted(rows, weights):
            return combine(rows, dataclasses.replace(routing, weights=weights), plan=plan)

        if name == "combine":
            return weighted(rows, routing.weights)
        return jax.vjp(weighted, rows, routing.weights)[1](*dout)  # XLA drops the forward

    def work(self, name, problem, *operands):
        rows = {"permute": 1 + problem.k, "combine": 1 + problem.k, "combine_bwd": 1 + 2 * problem.k}[name]
        return problem.T * problem.D * jnp.dtype(problem.dtype).itemsize * rows


_PROBLEM = Problem(16384, 4096, 2, "bfloat16")
DESCRIPTION = Description(
    functions=(
        Function(
            permute,
            residuals=names("permute", "rows"),
            wrt=("x",),
            reference=lambda a: permute_reference(a["x"], a["routing"]),
            problem=_PROBLEM,
        ),
        Function(
            combine,
            residuals=names("combine", "out"),
            wrt=("rows", "routing.weights"),
            reference=lambda a: combine_reference(a["rows"], a["routing"]),
            problem=_PROBLEM,
        ),
    ),
    tuning=_Tuning(),
)
