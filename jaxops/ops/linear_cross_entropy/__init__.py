"""The last layer of a language model and its loss, without the logits in memory."""

from jaxops.ops.linear_cross_entropy.api import linear_cross_entropy
from jaxops.ops.linear_cross_entropy.plan import Plan, Problem, make_plan

__all__ = ["Plan", "Problem", "linear_cross_entropy", "make_plan"]
