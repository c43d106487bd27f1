"""Grouped matrix multiplication over ragged, device-side row groups."""

from jaxops.ops.grouped_matmul.api import grouped_matmul, grouped_wgrad
from jaxops.ops.grouped_matmul.jax_ragged_dot import ragged_dot
from jaxops.ops.grouped_matmul.jax_ragged_dot_general import ragged_dot_general
from jaxops.ops.grouped_matmul.modalities import Part, Shapes, cost_of, first_groups, shapes_of
from jaxops.ops.grouped_matmul.plan import (
    LEAST_ROWS_OF_UNIT,
    LONG_SUM,
    PASSES,
    PLANNER,
    Plan,
    Problem,
    Tiles,
    candidates,
    check_triton,
    make_plan,
    runs_triton,
    takes_triton,
)
from jaxops.ops.grouped_matmul.product import Spec, grouped_matmul_sum, matmul, sums_of_groups
from jaxops.ops.grouped_matmul.tuning import ProductTuning

__all__ = [
    "LEAST_ROWS_OF_UNIT", "LONG_SUM", "PASSES", "PLANNER", "Part", "Plan", "Problem", "ProductTuning", "Shapes", "Spec",
    "Tiles", "candidates", "check_triton", "cost_of", "first_groups", "grouped_matmul", "grouped_matmul_sum",
    "grouped_wgrad", "make_plan", "matmul", "ragged_dot", "ragged_dot_general", "runs_triton", "shapes_of",
    "sums_of_groups", "takes_triton",
]  # fmt: skip
