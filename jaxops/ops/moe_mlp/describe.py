"""What tools and tests ask of moe_mlp."""

import math

import jax
import jax.numpy as jnp

from jaxops._lib.planning.description import Description, Function, Given, names
from jaxops.ops.moe_mlp.api import moe_mlp
from jaxops.ops.moe_mlp.plan import Problem
from jaxops.ops.moe_mlp.reference import moe_mlp_reference


def _reference(a: Given) -> jax.Array:
    weights = (a["w_gate"], a["w_up"], a["w_down"])
    if not a["w_down"].shape[0]:  # no expert to look up
        return jnp.zeros((a["x"].shape[0], a["w_down"].shape[2]), jnp.float32)
    return moe_mlp_reference(a["x"], *weights, a["routing"], biases=a["biases"], activation=a["activation"])


def _gathered_bytes(a: Given) -> int:
    """Of each choice's own weights."""
    T, k = a["routing"].row_positions.shape
    return (
        4 * T * k * sum(math.prod(w.shape[1:]) for name in ("w_gate", "w_up", "w_down") if (w := a[name]) is not None)
    )


# Without rows of its own: it takes those of grouped_glu, grouped_matmul and permute.
DESCRIPTION = Description(
    functions=(
        Function(
            moe_mlp,
            residuals=names("moe_mlp", "x w_gate_up w_down gate up gate_up out"),
            wrt=("x", "w_gate", "w_up", "w_down", "biases", "routing.weights"),
            reference=_reference,
            reference_bytes=_gathered_bytes,
            problem=Problem(16384, 2, 8, 4096, 14336, 4096, "bfloat16"),
        ),
    ),
)
