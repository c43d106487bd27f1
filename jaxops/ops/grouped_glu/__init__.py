"""Gated linear units over ragged, device-side row groups: the first half of a mixture-of-experts layer's experts."""

from jaxops.ops.grouped_glu.api import glu_of_rows, grouped_glu
from jaxops.ops.grouped_glu.plan import SAVES, Block, Fused, Order, Plan, Problem, candidates, make_plan

__all__ = [
    "SAVES",
    "Block",
    "Fused",
    "Order",
    "Plan",
    "Problem",
    "candidates",
    "glu_of_rows",
    "grouped_glu",
    "make_plan",
]
