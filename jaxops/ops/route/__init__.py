"""Routing of tokens to experts: top-k choices, their weights, the order of the rows that the grouped products read, and the routers' losses."""

from jaxops.ops.route.api import route, update_router_bias
from jaxops.ops.route.logits import router_logits
from jaxops.ops.route.plan import Plan, Problem, Tiles, candidates, make_plan
from jaxops.ops.route.routing import Routing

__all__ = [
    "Plan",
    "Problem",
    "Routing",
    "Tiles",
    "candidates",
    "make_plan",
    "route",
    "router_logits",
    "update_router_bias",
]
