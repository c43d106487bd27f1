"""Recipes by torchao's names: which tensor takes which FP8 format and how many numbers share a scale, and what each product may do."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Format:
    """How one tensor is quantised.

    Attributes:
      scaling: as in `jaxops.quantize`.
      dtype: the name of an FP8 dtype.
    """

    scaling: Literal["tensorwise", "rowwise", "block_1x128", "block_128x128"]
    dtype: str = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the three products of a linear layer are done.

    Attributes:
      name: what a caller writes.
      x, w, dy: formats of the activations, the weights and the gradient of the result.
      gw_hp: the weight gradient is a bfloat16 product of x and dy as they were before any cast.
      fast: passes in which the tensor core may sum over all of K by itself, in about 14 bits.
      delayed: x and w are scaled by what the caller has measured in earlier steps.
    """

    name: str
    x: Format
    w: Format
    dy: Format
    gw_hp: bool = False
    fast: frozenset[str] = frozenset()
    delayed: bool = False


def _recipes() -> dict[str, Recipe]:
    tensor, row, block = Format("tensorwise"), Format("rowwise"), Format("block_1x128")
    # Gradients reach further down than weights and activations: with one scale for all of them they take the format of the wider range
    # (Micikevicius et al. 2022, arXiv:2209.05433). The forward's sums are the fast ones, as in TransformerEngine and torchao.
    gradient, fast = Format("tensorwise", "float8_e5m2"), frozenset({"fwd"})
    found = [
        Recipe("tensorwise", tensor, tensor, gradient, fast=fast),
        Recipe("delayed", tensor, tensor, gradient, fast=fast, delayed=True),
        Recipe("rowwise", row, row, row, fast=fast),
        Recipe("rowwise_with_gw_hp", row, row, row, fast=fast, gw_hp=True),
        Recipe("blockwise", block, Format("block_128x128"), block),
        Recipe("blockwise_with_gw_hp", block, Format("block_128x128"), block, gw_hp=True),
    ]
    return {recipe.name: recipe for recipe in found}


RECIPES = _recipes()


def find_recipe(name: str, supported: tuple[str, ...] = tuple(RECIPES)) -> Recipe:
    """
    Raises:
      ValueError: a recipe that is none, or not among those supported.
    """
    if name not in supported:
        raise ValueError(f"recipe={name!r}: write {', '.join(map(repr, supported[:-1]))} or {supported[-1]!r}.")
    return RECIPES[name]
