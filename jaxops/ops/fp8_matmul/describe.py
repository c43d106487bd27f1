"""What tools and tests ask of fp8_matmul."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.numerics.fp8 import Quantized
from jaxops._lib.planning.description import Description, Function, Given, names
from jaxops._lib.planning.device import current_device, runs_gluon
from jaxops.ops.fp8_matmul.api import fp8_grouped_matmul, fp8_matmul
from jaxops.ops.fp8_matmul.plan import PLANNER, Problem, make_plan
from jaxops.ops.fp8_matmul.product import Spec, multiply
from jaxops.ops.fp8_matmul.recipes import RECIPES, SIDES
from jaxops.ops.grouped_matmul import ProductTuning, grouped_matmul
from jaxops.ops.quantize import cast, dequantize


def _whole(x: Any) -> jax.Array:
    """In float32, from an array or a `Quantized`."""
    return dequantize(x, jnp.float32) if isinstance(x, Quantized) else x


def _dense(a: Given) -> Any:
    lhs, rhs = _whole(a["lhs"]), _whole(a["rhs"])
    out = jnp.matmul(lhs, rhs, precision="highest")
    if a["amax"] is None:
        return out
    # What the call measured has no gradient.
    return out, tuple(jnp.max(jnp.abs(lax.stop_gradient(x)), initial=0.0) for x in (lhs, rhs))


def _grouped(a: Given) -> jax.Array:
    lhs, rhs = _whole(a["lhs"]), _whole(a["rhs"])
    return grouped_matmul(lhs, rhs, a["group_offsets"], precision="highest", backend="xla")


class _Tuning(ProductTuning):
    """The products alone, without their casts."""

    planner, problem, may_be_0 = PLANNER, Problem, ("G",)
    values = {"recipe": (tuple(RECIPES), ("tensorwise", "rowwise", "blockwise"))}  # noqa: RUF012

    def kernels(self, problem, device) -> tuple[str, ...]:
        return ("triton",) if runs_gluon(device) and problem.quantize_lhs else ("pallas",)

    def passes(self, problem) -> tuple[str, ...]:
        names = super().passes(problem) if problem.quantize_lhs else ("fwd", "dgrad")  # rhs has no gradient
        return tuple(name for name in names if name not in RECIPES[problem.recipe].half)

    def operands(self, name, problem, tensors, offsets):
        both = []
        for tensor, layout in SIDES[name]:
            x = tensors[tensor]
            if tensor == "rhs" or problem.quantize_lhs:
                ragged = offsets if layout == "col" and tensor != "rhs" else None
                x, _ = cast(x, RECIPES[problem.recipe].form(tensor), layout, group_offsets=ragged)
            both.append(x)
        return *both, offsets

    def run(self, name, problem, plan, a, b, offsets):
        plan, dtype = make_plan(problem, current_device(), plan=plan), problem.dtype
        recipe = dataclasses.replace(RECIPES[problem.recipe], half=frozenset())
        spec = Spec(recipe, plan, dtype, dtype, dtype, problem.quantize_lhs)
        return multiply(spec, name, a, b, offsets, problem.M if name == "wgrad" else None)


_COMPARES = "beside a product that quantizes nothing: the errors are mostly FP8's rounding"
DESCRIPTION = Description(
    functions=(
        Function(
            fp8_matmul,
            residuals=names("fp8_matmul", "lhs rhs out"),
            wrt=("lhs", "rhs"),
            reference=_dense,
            compares=_COMPARES,
            problem=Problem(8192, 4096, 14336, "blockwise", "bfloat16"),
        ),
        Function(
            fp8_grouped_matmul,
            residuals=names("fp8_grouped_matmul", "lhs rhs out"),
            wrt=("lhs", "rhs"),
            reference=_grouped,
            compares=_COMPARES,
            problem=Problem(8192, 4096, 14336, "blockwise", "bfloat16", 8),
        ),
    ),
    tuning=_Tuning(),
)
