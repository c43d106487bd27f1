"""Linear layers multiplied in FP8, dense and over ragged groups."""

from jaxops._lib.arrays.checks import check_out_sharding
from jaxops.ops.fp8_matmul.api import check_grouped_recipe, fp8_grouped_matmul, fp8_matmul
from jaxops.ops.fp8_matmul.gemm_pallas import Side, part_of_steps, sums_of_rows
from jaxops.ops.fp8_matmul.operand import Operand, operand_of, shape_of, unquantized
from jaxops.ops.fp8_matmul.plan import UNIT_TILES, Plan, Problem, Tiles, candidates, make_plan, takes_unit
from jaxops.ops.fp8_matmul.product import Spec, multiply, multiply_unit, name_quantized
from jaxops.ops.fp8_matmul.recipes import RECIPES, Format, Recipe

__all__ = [
    "RECIPES", "UNIT_TILES", "Format", "Operand", "Plan", "Problem", "Recipe", "Side", "Spec", "Tiles", "candidates",
    "check_grouped_recipe", "check_out_sharding", "fp8_grouped_matmul", "fp8_matmul", "make_plan", "multiply",
    "multiply_unit", "name_quantized", "operand_of", "part_of_steps", "shape_of", "sums_of_rows", "takes_unit",
    "unquantized",
]  # fmt: skip
