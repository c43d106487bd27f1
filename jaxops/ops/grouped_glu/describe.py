"""What tools and tests ask of grouped_glu."""

import jax.numpy as jnp
import numpy as np

from jaxops._lib.planning.description import Description, Function, Tuning, names, product_bytes, random
from jaxops._lib.planning.device import current_device
from jaxops.ops.grouped_glu.api import grouped_glu, unit_backward, unit_forward
from jaxops.ops.grouped_glu.plan import PLANNER, Problem, Spec, make_plan
from jaxops.ops.grouped_glu.reference import grouped_glu_reference


class _Tuning(Tuning):
    """The gated unit and its gradients alone: the products have rows of grouped_matmul."""

    planner, problem, shape, unit = PLANNER, Problem, ("G", "M", "K", "F"), "gbps"

    def splits(self, problem):
        return [np.array([problem.M])]

    def tensors(self, problem):
        """The pre-activations (gate and up, or both in one array) and the cotangent of h."""
        p, columns = problem, [problem.F] * 2 if not problem.joined else [2 * problem.F]
        pre = tuple(random(seed, (p.M, N), p.dtype) for seed, N in enumerate(columns))
        return pre, random(2, (p.M, p.F), p.dtype)

    def operands(self, name, problem, tensors, offsets):
        pre, dh = tensors
        return (pre, offsets) if name == "fwd" else (pre, dh, offsets)

    def run(self, name, problem, plan, *operands):
        dtype = jnp.dtype(problem.dtype)
        plan = make_plan(problem, current_device(), plan=plan)
        spec = Spec(plan, "silu", True, None, dtype, dtype, dtype, dtype)
        return (unit_forward if name == "fwd" else unit_backward)(spec, *operands)

    def work(self, name, problem, *operands):
        return problem.M * problem.F * jnp.dtype(problem.dtype).itemsize * {"fwd": 3, "bwd": 5}[name]


DESCRIPTION = Description(
    functions=(
        Function(
            grouped_glu,
            residuals=names("grouped_glu", "x gate up gate_up out"),
            wrt=("x", "w_gate", "w_up", "biases"),
            reference=lambda a: grouped_glu_reference(
                a["x"], a["w_gate"], a["w_up"], a["group_offsets"], biases=a["biases"], activation=a["activation"]
            ),
            reference_bytes=product_bytes("x", "w_gate"),
            problem=Problem(8, 32768, 4096, 14336, "bfloat16"),
        ),
    ),
    tuning=_Tuning(),
)
