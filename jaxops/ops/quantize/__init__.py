"""FP8 with scales: one pass over a tensor writes the layouts for products over its columns and over its rows."""

from jaxops._lib.numerics.fp8 import Quantized
from jaxops.ops.quantize.api import cast, dequantize, quantize
from jaxops.ops.quantize.computed import quantize_computed
from jaxops.ops.quantize.outputs import Beside, Computed, Format, Gathered, Halves, Output
from jaxops.ops.quantize.plan import Plan, Problem, Tiles, candidates, make_plan

__all__ = [
    "Beside", "Computed", "Format", "Gathered", "Halves", "Output", "Plan", "Problem", "Quantized", "Tiles",
    "candidates", "cast", "dequantize", "make_plan", "quantize", "quantize_computed",
]  # fmt: skip
