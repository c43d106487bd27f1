"""Flax NNX modules around the ops. Linen users wrap them with `flax.nnx.bridge.to_linen`."""

from jaxops.nn.adaln import AdaLayerNorm, AdaLNZeroBlock, AdaRMSNorm
from jaxops.nn.grouped_linear import GroupedLinear

__all__ = ["AdaLNZeroBlock", "AdaLayerNorm", "AdaRMSNorm", "GroupedLinear"]
