"""Softmax attention within sequences that are packed one after another."""

from jaxops.ops.packed_attention.api import packed_attention
from jaxops.ops.packed_attention.plan import Plan, Problem, Tiles, candidates, make_plan

__all__ = ["Plan", "Problem", "Tiles", "candidates", "make_plan", "packed_attention"]
