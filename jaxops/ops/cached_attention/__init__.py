"""Attention of one token a row, as in decoding, to the tokens before it, whose keys and values are in a cache."""

from jaxops.ops.cached_attention.api import cached_attention

__all__ = ["cached_attention"]
