"""The last layer of a language model and its loss, without the logits in memory."""

from jaxops.ops.linear_cross_entropy.api import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
