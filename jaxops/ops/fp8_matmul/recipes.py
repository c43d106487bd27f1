"""Recipes by torchao's names. A recipe is one entry of `RECIPES`: the ops, the layers, the plans and the tests read all
that it changes from there.
"""

import dataclasses
from typing import Literal

from jaxops.ops.quantize import Format


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the three products of a linear layer run.

    Attributes:
      name: the public `recipe=`.
      lhs, rhs, dout: formats of the operands and of the result's cotangent.
      half: gradients that are products of unquantized operands in half precision: "dgrad" (of lhs), "wgrad" (of rhs).
      fast: passes whose products the tensor core may accumulate over all of K, in about 14 bits.
      delayed: lhs and rhs are scaled by the `amax` of earlier steps.
    """

    name: str
    lhs: Format
    rhs: Format
    dout: Format
    half: frozenset[str] = frozenset()
    fast: frozenset[str] = frozenset()
    delayed: bool = False

    def with_pow2_scales(self) -> "Recipe":
        """The same with scales that are powers of two."""
        forms = {name: dataclasses.replace(getattr(self, name), pow2=True) for name in ("lhs", "rhs", "dout")}
        return dataclasses.replace(self, **forms)

    def layouts(self, dgrad: bool, wgrad: bool) -> Literal["row", "col", "both", "none"]:
        """The layouts of the cotangent that its products in FP8 read.

        Args:
          dgrad, wgrad: which gradients are needed.
        """
        row, col = dgrad and "dgrad" not in self.half, wgrad and "wgrad" not in self.half
        return "both" if row and col else "row" if row else "col" if col else "none"


_TENSOR, _ROW, _BLOCK = Format("tensorwise"), Format("rowwise"), Format("block_1x128")
_BLOCKWISE = (_BLOCK, Format("block_128x128"), _BLOCK)
# Gradients span more binades than weights and activations: with one scale per tensor they take e5m2, the wider format
# (Micikevicius et al. 2022, arXiv:2209.05433). Only the forward accumulates fast, as in TransformerEngine and torchao.
_TENSORWISE, _ROWWISE = (_TENSOR, _TENSOR, Format("tensorwise", "float8_e5m2")), (_ROW, _ROW, _ROW)
_FAST, _HALF_WGRAD = frozenset({"fwd"}), frozenset({"wgrad"})
_ALL = (
    Recipe("tensorwise", *_TENSORWISE, fast=_FAST),
    Recipe("delayed", *_TENSORWISE, fast=_FAST, delayed=True),
    Recipe("rowwise", *_ROWWISE, fast=_FAST),
    Recipe("rowwise_with_gw_hp", *_ROWWISE, fast=_FAST, half=_HALF_WGRAD),
    Recipe("blockwise", *_BLOCKWISE),
    Recipe("blockwise_with_gw_hp", *_BLOCKWISE, half=_HALF_WGRAD),
)
RECIPES = {recipe.name: recipe for recipe in _ALL}
