"""Recipes by torchao's names: the FP8 format and the scaling of each tensor, and how each product accumulates."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Format:
    """How one tensor is quantized: `scaling` as in `jaxops.quantize`, and the name of an FP8 dtype."""

    scaling: Literal["tensorwise", "rowwise", "block_1x128", "block_128x128"]
    dtype: str = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the three products of a linear layer run.

    Attributes:
      name: the public `recipe=`.
      lhs, rhs, dout: formats of the operands and of the result's cotangent.
      gw_hp: the gradient of rhs is a bfloat16 product of the unquantized lhs and cotangent.
      fast: passes whose products the tensor core may accumulate over all of K, in about 14 bits.
      delayed: lhs and rhs are scaled by the `amax` of earlier steps.
    """

    name: str
    lhs: Format
    rhs: Format
    dout: Format
    gw_hp: bool = False
    fast: frozenset[str] = frozenset()
    delayed: bool = False


_TENSOR, _ROW, _BLOCK = Format("tensorwise"), Format("rowwise"), Format("block_1x128")
_BLOCKWISE = (_BLOCK, Format("block_128x128"), _BLOCK)
# Gradients span more binades than weights and activations: with one scale per tensor they take e5m2, the wider format
# (Micikevicius et al. 2022, arXiv:2209.05433). Only the forward accumulates fast, as in TransformerEngine and torchao.
_GRADIENT, _FAST = Format("tensorwise", "float8_e5m2"), frozenset({"fwd"})
_ALL = (
    Recipe("tensorwise", _TENSOR, _TENSOR, _GRADIENT, fast=_FAST),
    Recipe("delayed", _TENSOR, _TENSOR, _GRADIENT, fast=_FAST, delayed=True),
    Recipe("rowwise", _ROW, _ROW, _ROW, fast=_FAST),
    Recipe("rowwise_with_gw_hp", _ROW, _ROW, _ROW, fast=_FAST, gw_hp=True),
    Recipe("blockwise", *_BLOCKWISE),
    Recipe("blockwise_with_gw_hp", *_BLOCKWISE, gw_hp=True),
)
RECIPES = {recipe.name: recipe for recipe in _ALL}
