"""Rows of tokens to their experts and back: each token's row copied to its choices' rows, and the weighted sum of what the experts made of them."""

from jaxops.ops.permute.api import check_routing, combine, permute
from jaxops.ops.permute.plan import Plan, Problem, Tiles, candidates, make_plan

__all__ = ["Plan", "Problem", "Tiles", "candidates", "check_routing", "combine", "make_plan", "permute"]
