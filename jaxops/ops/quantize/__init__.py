"""FP8 with scales: one pass over a tensor writes the layouts for products over its columns and over its rows."""

from jaxops._lib.numerics.fp8 import Quantized
from jaxops.ops.quantize.api import dequantize, quantize, quantize_beside, quantize_gathered, quantize_measured
from jaxops.ops.quantize.computed import quantize_computed
from jaxops.ops.quantize.outputs import Computed, Halves, Output
from jaxops.ops.quantize.plan import Plan, Problem, Tiles, candidates, make_plan

__all__ = [
    "Computed", "Halves", "Output", "Plan", "Problem", "Quantized", "Tiles", "candidates", "dequantize", "make_plan",
    "quantize", "quantize_beside", "quantize_computed", "quantize_gathered", "quantize_measured",
]  # fmt: skip
