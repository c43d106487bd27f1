"""Gated linear units over ragged, device-side row groups: the first half of a mixture-of-experts layer's experts."""

from jaxops.ops.grouped_glu.api import glu_of_rows, grouped_glu
from jaxops.ops.grouped_glu.plan import SAVES, FusedTiles, Plan, Problem, TileOrder, Tiles, candidates, make_plan

__all__ = [
    "SAVES",
    "FusedTiles",
    "Plan",
    "Problem",
    "TileOrder",
    "Tiles",
    "candidates",
    "glu_of_rows",
    "grouped_glu",
    "make_plan",
]
