"""Grouped matrix multiplication over modalities whose matrices differ in number and in size, in one call."""

from jaxops.ops.modality_grouped_matmul.api import modality_grouped_matmul
from jaxops.ops.modality_grouped_matmul.plan import Plan, Problem, make_plan

__all__ = ["Plan", "Problem", "make_plan", "modality_grouped_matmul"]
