"""Gated linear units over ragged, device-side row groups: the first half of a mixture-of-experts layer's experts."""

from jaxops._lib.numerics.activations import Activation, activation_name
from jaxops.ops.grouped_glu.api import glu_of_rows, grouped_glu
from jaxops.ops.grouped_glu.fwd_pallas import Unit, launch_unit
from jaxops.ops.grouped_glu.plan import (
    SAVES,
    FusedTiles,
    Plan,
    Problem,
    TileOrder,
    Tiles,
    candidates,
    few_rows,
    few_rows_cut,
    make_plan,
)

__all__ = [
    "SAVES", "Activation", "FusedTiles", "Plan", "Problem", "TileOrder", "Tiles", "Unit", "activation_name",
    "candidates", "few_rows", "few_rows_cut", "glu_of_rows", "grouped_glu", "launch_unit", "make_plan",
]  # fmt: skip
