"""Adaptive layer norm over packed sequences of unequal length, alone or after a gated residual."""

from jaxops.ops.adaln.api import adaln, gated_residual, gated_residual_adaln
from jaxops.ops.adaln.plan import Plan, Problem, Tiles, candidates, make_plan

__all__ = ["Plan", "Problem", "Tiles", "adaln", "candidates", "gated_residual", "gated_residual_adaln", "make_plan"]
