"""Grouped matrix multiplication with one array of weights a modality."""

from jaxops.ops.modality_grouped_matmul.api import modality_grouped_matmul
from jaxops.ops.modality_grouped_matmul.plan import make_plans

__all__ = ["make_plans", "modality_grouped_matmul"]
