"""Grouped matrix multiplication over ragged, device-side row groups, with one array of weights or one a modality."""

from jaxops.ops.grouped_matmul.api import grouped_matmul, grouped_wgrad, modality_grouped_matmul
from jaxops.ops.grouped_matmul.jax_ragged_dot import ragged_dot
from jaxops.ops.grouped_matmul.modalities import make_plans
from jaxops.ops.grouped_matmul.plan import (
    LEAST_ROWS_OF_UNIT,
    Plan,
    Problem,
    Tiles,
    candidates,
    check_triton,
    make_plan,
    runs_triton,
    takes_triton,
)
from jaxops.ops.grouped_matmul.product import grouped_matmul_sum
from jaxops.ops.grouped_matmul.tuning import ProductTuning

__all__ = [
    "LEAST_ROWS_OF_UNIT",
    "Plan",
    "Problem",
    "ProductTuning",
    "Tiles",
    "candidates",
    "check_triton",
    "grouped_matmul",
    "grouped_matmul_sum",
    "grouped_wgrad",
    "make_plan",
    "make_plans",
    "modality_grouped_matmul",
    "ragged_dot",
    "runs_triton",
    "takes_triton",
]
