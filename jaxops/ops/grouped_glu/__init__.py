"""Gated linear units over ragged, device-side row groups: the first half of a mixture-of-experts layer's experts."""

from jaxops._lib.numerics.activations import Activation, UnitActivation, activation_name
from jaxops.ops.grouped_glu.api import check_biases, glu_of_rows, grouped_glu
from jaxops.ops.grouped_glu.fwd_pallas import Unit, launch_unit
from jaxops.ops.grouped_glu.plan import (
    SAVES,
    Biases,
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
    "SAVES", "Activation", "Biases", "FusedTiles", "Plan", "Problem", "TileOrder", "Tiles", "Unit", "UnitActivation",
    "activation_name", "candidates", "check_biases", "few_rows", "few_rows_cut", "glu_of_rows", "grouped_glu",
    "launch_unit", "make_plan",
]  # fmt: skip
