"""Recipes by torchao's names. A recipe is one entry of `RECIPES`: the ops, the layers, the plans and the tests read all
that it changes from there.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from jaxops.ops.quantize import Format

# The operands of each product, and the layout of each that it reads: its last axis is contracted.
SIDES: dict[str, tuple[tuple[str, Literal["row", "col"]], ...]] = {
    "fwd": (("lhs", "row"), ("rhs", "col")),
    "dgrad": (("dout", "row"), ("rhs", "row")),
    "wgrad": (("lhs", "col"), ("dout", "col")),
}
# The scalings of two operands that all kernels multiply.
PAIRS = frozenset({
    ("tensorwise", "tensorwise"), ("rowwise", "rowwise"), ("block_1x128", "block_128x128"),
    ("block_1x128", "block_1x128"),
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the three products of a linear layer run.

    Attributes:
      name: the public `recipe=`.
      lhs, rhs, dout: formats of the operands and of the result's cotangent.
      half: gradients that are products of unquantized operands in half precision: "dgrad" (of lhs), "wgrad" (of rhs).
      fast: passes whose products the tensor core may accumulate over all of K, in about 14 bits.
      delayed: lhs and rhs are scaled by the `amax` of earlier steps.

    A tensor has one format in all products that read it.

    Raises:
      ValueError: a product of two scalings that no kernel multiplies.
    """

    name: str
    lhs: Format
    rhs: Format
    dout: Format
    half: frozenset[str] = frozenset()
    fast: frozenset[str] = frozenset()
    delayed: bool = False

    def __post_init__(self):
        for name, ((a, _), (b, _)) in SIDES.items():
            pair = self.form(a).scaling, self.form(b).scaling
            if name not in self.half and pair not in PAIRS:
                product = f"{a} {pair[0]!r} by {b} {pair[1]!r} in {name}"
                hint = f"give them one of {sorted(PAIRS)}" + ("." if name == "fwd" else f", or put {name!r} into half.")
                raise ValueError(f"recipe {self.name!r} multiplies {product}: {hint}")

    def with_pow2_scales(self) -> "Recipe":
        """The same with scales that are powers of two."""
        forms = {name: dataclasses.replace(self.form(name), pow2=True) for name in ("lhs", "rhs", "dout")}
        return dataclasses.replace(self, **forms)

    def form(self, tensor: str) -> Format:
        """Of "lhs", "rhs" or "dout"."""
        return getattr(self, tensor)

    def layouts(self, tensor: str, passes: Iterable[str]) -> Literal["row", "col", "both", "none"]:
        """The layouts of a tensor that these passes, as far as they are products in FP8, read."""
        read = {layout for name in passes if name not in self.half for x, layout in SIDES[name] if x == tensor}
        return "both" if len(read) == 2 else "row" if "row" in read else "col" if read else "none"

    def kernel(self, name: str) -> tuple:
        """What a pass's kernel depends on: the formats of its operands, and whether sums stay in the tensor core."""
        forms = (self.form(tensor) for tensor, _ in SIDES[name])
        return *((form.scaling, form.dtype) for form in forms), name in self.fast


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
