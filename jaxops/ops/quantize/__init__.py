"""FP8 with scales: one pass over a tensor writes the layouts for products over its columns and over its rows."""

from jaxops._lib.fp8 import Quantized
from jaxops.ops.quantize.api import dequantize, quantize, quantize_beside, quantize_gathered, quantize_measured
from jaxops.ops.quantize.plan import Plan, Problem, Tiles, candidates, make_plan

# fmt: off
__all__ = [
    "Plan", "Problem", "Quantized", "Tiles", "candidates", "dequantize", "make_plan", "quantize", "quantize_beside",
    "quantize_gathered", "quantize_measured",
]
