"""The experts of a mixture-of-experts layer, from tokens to tokens; on Hopper with fused epilogues and gathers."""

from jaxops.ops.moe_mlp.api import moe_mlp
from jaxops.ops.moe_mlp.plan import Plan, Problem, TileOrder, make_plan

__all__ = ["Plan", "Problem", "TileOrder", "make_plan", "moe_mlp"]
