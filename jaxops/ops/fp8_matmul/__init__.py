"""Linear layers multiplied in FP8, dense and over ragged groups."""

from jaxops.ops.fp8_matmul.api import fp8_grouped_matmul, fp8_matmul
from jaxops.ops.fp8_matmul.plan import Plan, Problem, Tiles, candidates, make_plan
from jaxops.ops.fp8_matmul.recipes import RECIPES, Format, Recipe

__all__ = [
    "RECIPES", "Format", "Plan", "Problem", "Recipe", "Tiles", "candidates", "fp8_grouped_matmul", "fp8_matmul",
    "make_plan",
]  # fmt: skip
