"""Attention of one token a row, as in decoding, to the tokens before it, whose keys and values are in a cache."""

from jaxops.ops.cached_attention.api import cached_attention
from jaxops.ops.cached_attention.plan import Plan, Problem, Tiles, candidates, make_plan

__all__ = ["Plan", "Problem", "Tiles", "cached_attention", "candidates", "make_plan"]
