"""The gated unit and its backward, each in one pass over memory that also casts its results to FP8."""

import functools
from collections.abc import Callable

import jax

from jaxops._lib.numerics.activations import activate_and_slope, quick_sigmoid
from jaxops._lib.numerics.fp8 import Quantized
from jaxops.ops.fp8_matmul import Recipe
from jaxops.ops.quantize import Computed, Halves, Output, quantize_computed


@functools.cache
def _unit(activation: str) -> Callable:
    def unit(gate, up):
        value, _ = activate_and_slope(gate, activation, quick_sigmoid)
        return (value * up,), ()

    return unit


@functools.cache
def _unit_bwd(activation: str) -> Callable:
    def unit_bwd(dh, gate, up, weights):
        value, slope = activate_and_slope(gate, activation, quick_sigmoid)
        h, weighted = value * up, weights * dh
        return (weighted * up * slope, weighted * value, weights * h), (dh * h,)

    return unit_bwd


def unit_cast(
    activation: str,
    recipe: Recipe,
    gate_up: jax.Array,
    offsets: jax.Array,
    *,
    backend: str = "auto",
) -> Quantized:
    """The row layout of h = act(gate) * up [R, F], rounded to gate_up's dtype first.

    Args:
      gate_up: [R, 2 * F], gate's columns first.
      offsets: [G + 1] int32; rows outside the groups hold anything, and are unspecified in the result.
    """
    operands, outputs = [Halves(gate_up)], [Output(recipe.lhs, "row")]
    (h,), _ = quantize_computed(
        _unit(activation), operands, outputs, group_offsets=offsets, dtype=gate_up.dtype, backend=backend
    )
    assert h.row is not None
    return h.row


def unit_bwd_cast(
    activation: str,
    recipe: Recipe,
    dh: jax.Array,
    gate_up: jax.Array,
    weights: jax.Array,
    offsets: jax.Array,
    *,
    backend: str = "auto",
) -> tuple[Computed, Computed, jax.Array]:
    """The unit's gradient, cast to `recipe.dout`, and the unit times the router's weights, to `recipe.lhs`.

    All are rounded to gate_up's dtype first. Gradients in half precision read the rounded tensors, the others layouts.

    Args:
      dh: [R, F], the gradient of h before the router's weights.
      gate_up: [R, 2 * F], gate's columns first.
      weights: [R] float32, of the rows.
      offsets: [G + 1] int32; rows outside the groups hold anything, and are unspecified in the result, except that they
        are in no column layout and no tensorwise scale.

    Returns:
      The gradient: the row layout [R, 2 * F], gate's columns first, the column layouts of gate's and up's, both [R, F]
      unquantized, of these what the recipe's gradients read. The weighted unit: its column layout or itself. And parts
      [n, R] float32 of the gradients of the weights, for `sums_of_choices`.
    """
    dpre = Output(recipe.dout, recipe.layouts("dout", ("dgrad", "wgrad")), 2, bool(recipe.half))
    h = Output(recipe.lhs, recipe.layouts("lhs", ("wgrad",)), 1, "wgrad" in recipe.half)
    compute, operands = _unit_bwd(activation), [dh, Halves(gate_up), weights]
    (dpre, h), (dots,) = quantize_computed(
        compute, operands, [dpre, h], group_offsets=offsets, dtype=gate_up.dtype, sums=1, backend=backend
    )
    return dpre, h, dots
