"""Rows of tokens to their experts and back: copies of each token's row, and weighted sums of the experts' outputs."""

from jaxops.ops.permute.api import (
    check_routing,
    combine,
    permute,
    permute_quantized,
    permute_within_groups,
    sum_of_rows,
)
from jaxops.ops.permute.plan import Plan, Problem, Tiles, candidates, make_plan

__all__ = [
    "Plan",
    "Problem",
    "Tiles",
    "candidates",
    "check_routing",
    "combine",
    "make_plan",
    "permute",
    "permute_quantized",
    "permute_within_groups",
    "sum_of_rows",
]
