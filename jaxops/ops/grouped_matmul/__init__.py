"""Grouped matrix multiplication over ragged, device-side row groups."""

from jaxops.ops.grouped_matmul.api import grouped_matmul, grouped_matmul_sum, grouped_wgrad, ragged_dot
from jaxops.ops.grouped_matmul.plan import (
    Plan,
    Problem,
    Tiles,
    candidates,
    check_triton,
    kernels_for,
    make_plan,
    takes_triton,
)

__all__ = [
    "Plan",
    "Problem",
    "Tiles",
    "candidates",
    "check_triton",
    "grouped_matmul",
    "grouped_matmul_sum",
    "grouped_wgrad",
    "kernels_for",
    "make_plan",
    "ragged_dot",
    "takes_triton",
]
