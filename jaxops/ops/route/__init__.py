"""Top-k routing of tokens to experts: choices, weights, the order of rows for grouped products, and losses."""

from jaxops.ops.route.api import route, route_choices, update_router_bias
from jaxops.ops.route.logits import router_logits
from jaxops.ops.route.plan import Plan, Problem, Tiles, candidates, make_plan
from jaxops.ops.route.routing import Routing, choices_with_row, partial_routing, rows_in_groups
from jaxops.ops.route.xla import mean_shares

__all__ = [
    "Plan", "Problem", "Routing", "Tiles", "candidates", "choices_with_row", "make_plan", "mean_shares",
    "partial_routing", "route", "route_choices", "router_logits", "rows_in_groups", "update_router_bias",
]  # fmt: skip
