"""What tools and tests ask of quantize."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._lib.numerics.fp8 import SCALINGS, Quantized
from jaxops._lib.planning.description import Description, Function, Given, Tuning, random
from jaxops.ops.quantize.api import dequantize, quantize
from jaxops.ops.quantize.plan import LAYOUTS, PLANNER, Problem


def _reference(a: Given) -> list[jax.Array]:
    """x for each layout."""
    columns = a["layouts"] != "row" and a["group_offsets"] is None
    return [a["x"]] * ((a["layouts"] != "col") + columns)


def _tensors(results: Any) -> list[jax.Array]:
    """What the values and scales of each layout stand for, in float32. The columns of groups are padded: they stand for
    no tensor of a known shape."""
    if not isinstance(results, Quantized):  # the reference's
        return results
    layouts = [dataclasses.replace(results, values_t=None, scales_t=None)] if results.values is not None else []
    if results.values_t is not None and results.group_offsets is None:
        layouts.append(dataclasses.replace(results, values=None, scales=None))
    return [dequantize(layout, jnp.float32) for layout in layouts]


class _Tuning(Tuning):
    """A whole call is measured, whichever pass is tuned."""

    planner, problem, shape, unit = PLANNER, Problem, ("M", "K"), "gbps"
    values = {"scaling": (SCALINGS, SCALINGS), "layouts": (LAYOUTS, LAYOUTS)}  # noqa: RUF012

    def passes(self, problem):
        return ("amax", "cast") if problem.looks_first else ("cast",)

    def tensors(self, problem):
        return random(0, (problem.M, problem.K), problem.dtype)

    def run(self, name, problem, plan, x):
        q = quantize(x, scaling=problem.scaling, layouts=problem.layouts, plan=plan)
        return [jnp.atleast_1d(leaf) for leaf in jax.tree.leaves(q)]

    def work(self, name, problem, x):
        return x.size * (x.dtype.itemsize + (2 if problem.layouts == "both" else 1))


DESCRIPTION = Description(
    functions=(
        Function(
            quantize,
            wrt=("x",),
            reference=_reference,
            comparable=_tensors,
            compares="beside x itself: the errors are FP8's rounding",
            problem=Problem(16384, 4096, "bfloat16"),
        ),
        Function(dequantize),
    ),
    tuning=_Tuning(),
)
