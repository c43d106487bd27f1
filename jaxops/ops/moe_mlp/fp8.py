"""The experts in FP8: each tensor is cast once in each layout, where its numbers are made, for all products that read
it.

gate and up are one matrix [E, D, 2 * F] in all casts and products but the weight gradients. A token's row is cast once;
it is copied as FP8 to the rows of its choices, or gathered by the forward's product. The column layouts, which the
weight gradients read, are cast from the tokens through the row indices, so that no copy of all rows exists in half
precision.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.precision import named_cast
from jaxops._lib.numerics.fp8 import Quantized, magnitudes
from jaxops.ops import fp8_matmul
from jaxops.ops.fp8_matmul import Recipe, multiply, multiply_unit, name_quantized
from jaxops.ops.moe_mlp.plan import Spec
from jaxops.ops.moe_mlp.unit_fp8 import unit_bwd_cast, unit_cast
from jaxops.ops.moe_mlp.xla import sums_of_choices, weights_of_rows
from jaxops.ops.permute import combine, permute, permute_quantized
from jaxops.ops.quantize import Beside, Format, Gathered, cast
from jaxops.ops.route import Routing, choices_with_row, partial_routing

Experts = tuple[jax.Array, ...]  # the weights of gate, up and down


@dataclasses.dataclass(frozen=True)
class Fp8Spec(Spec):
    """With the recipe of all casts and products."""

    recipe: Recipe = dataclasses.field(kw_only=True)

    def of(self, part: str) -> fp8_matmul.Spec:
        """Of the products of one part, "unit" (gate and up) or "down"."""
        compute = self.compute_dtype.name
        return fp8_matmul.Spec(self.recipe, getattr(self.plan, part), compute, self.w_dtype.name, compute)

    @property
    def casting(self) -> str:
        """The backend of all casts."""
        return "xla" if self.plan.backend == "xla" else "pallas"

    def cast(self, source: Any, form: Format, layouts: Any = "row", **options) -> Quantized:
        return cast(source, form, layouts, backend=self.casting, **options)[0]


class _Saved(NamedTuple):
    """Of a forward, what the backward reads.

    Attributes:
      gate_up: [R, 2 * F], each row's products with the weights of gate and up.
      weights: the row layouts of gate's and up's weights, side by side, and of down's; or, for a dgrad in half
        precision, the weights of gate, up and down.
    """

    gate_up: jax.Array
    weights: tuple


def _amax(form: Format, x: jax.Array, routing: Routing) -> jax.Array | None:
    """For tensorwise scales, the largest magnitude of tokens that have a row here."""
    if form.scaling != "tensorwise":
        return None
    used = jnp.any(choices_with_row(routing), axis=1, keepdims=True)
    return jnp.max(jnp.where(used, magnitudes(x), 0.0))


def _rows_of_tokens(spec: Fp8Spec, x: jax.Array, form: Format, routing: Routing, amax: jax.Array | None) -> Quantized:
    """The row layout of the rows of x [T, D] in the order of experts."""
    assert spec.plan.rows is not None  # make_plan fills it
    return permute_quantized(spec.cast(x, form, amax=amax), routing, plan=spec.plan.rows)


def _columns_of_tokens(
    spec: Fp8Spec, x: jax.Array, form: Format, routing: Routing, amax: jax.Array | None
) -> Quantized:
    """Their column layout."""
    rows = Gathered(x, routing.row_indices)
    return spec.cast(rows, form, "col", group_offsets=routing.group_offsets, amax=amax)


def _run(spec: Fp8Spec, x: jax.Array, experts: Experts, routing: Routing, keep: bool) -> tuple[jax.Array, Any]:
    """(out [T, N], with keep what the backward reads)."""
    unit, down, recipe, offsets = spec.of("unit"), spec.of("down"), spec.recipe, routing.group_offsets
    layouts = recipe.layouts("rhs", ("fwd", *["dgrad"] * keep))
    # As without a recipe. XLA rounds in the pass that takes a layer's weights out of a stack of all layers'; float32
    # ones would be copied there, and read again by each cast.
    experts = tuple(_at_most(w, spec.compute_dtype) for w in experts)
    wide = spec.cast(Beside(*experts[:2]), recipe.rhs, layouts)
    narrow = spec.cast(experts[2], recipe.rhs, layouts)
    amax, indices = _amax(recipe.lhs, x, routing), None
    if spec.plan.gather:
        rows, indices = spec.cast(x, recipe.lhs, amax=amax), routing.row_indices
    else:
        rows = _rows_of_tokens(spec, x, recipe.lhs, routing, amax)
    if spec.plan.unit_inside:
        h, gate_up = multiply_unit(unit, rows, wide, offsets, spec.activation, keep, indices)
        gate_up = None if gate_up is None else checkpoint_name(gate_up, "moe_mlp.gate_up")
    else:
        gate_up = checkpoint_name(multiply(unit, "fwd", rows, wide, offsets), "moe_mlp.gate_up")
        h = unit_cast(spec.activation, recipe, gate_up, offsets, backend=spec.casting)
    y = multiply(down, "fwd", h, narrow, offsets)
    out = checkpoint_name(combine(y, routing, out_dtype=spec.out_dtype, plan=spec.plan.rows), "moe_mlp.out")
    if not keep:
        return out, None
    assert gate_up is not None
    if "dgrad" in recipe.half:
        return out, _Saved(gate_up, experts)
    rows_alone = (dataclasses.replace(w, values_t=None, scales_t=None) for w in (wide, narrow))
    named = zip(rows_alone, ("moe_mlp.w_gate_up", "moe_mlp.w_down"), strict=True)
    return out, _Saved(gate_up, tuple(name_quantized(w, name) for w, name in named))


def _at_most(w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """w in dtype if that is narrower."""
    return w.astype(dtype) if dtype.itemsize < w.dtype.itemsize else w


def _forward(spec: Fp8Spec, x: jax.Array, experts: Experts, routing: Routing) -> jax.Array:
    return _run(spec, x.astype(spec.compute_dtype), experts, routing, False)[0]


def _fwd(spec: Fp8Spec, x: jax.Array, experts: Experts, routing: Routing):
    x = named_cast(x, spec.compute_dtype, "moe_mlp.x")
    out, saved = _run(spec, x, experts, routing, spec.save != "nothing")
    # With save="nothing" the weights are cast again: they are kept anyway, as parameters.
    return out, (x, experts if spec.save == "nothing" else None, routing, saved)


def _bwd(spec: Fp8Spec, residuals, dout: jax.Array):
    x, experts, routing, saved = residuals
    # Not before dout exists: XLA would share casts or products with the forward, and keep them.
    x, dout = lax.optimization_barrier((x, dout))
    if saved is None:
        _, saved = _run(spec, x, experts, routing, True)
    unit, down, recipe, offsets = spec.of("unit"), spec.of("down"), spec.recipe, routing.group_offsets
    dout = dout.astype(spec.compute_dtype)
    amax = _amax(recipe.dout, dout, routing)
    to_rows = functools.partial(permute, routing=routing, plan=spec.plan.rows)
    half = "dgrad" in recipe.half
    dy = to_rows(dout) if half else _rows_of_tokens(spec, dout, recipe.dout, routing, amax)
    dh = multiply(down, "dgrad", dy, saved.weights[-1], offsets)
    dpre, h, dots = unit_bwd_cast(
        spec.activation, recipe, dh, saved.gate_up, weights_of_rows(routing), offsets, backend=spec.casting
    )
    pairs = zip(dpre.plain if half else (dpre.row,), saved.weights[:-1], strict=True)
    drows = functools.reduce(jnp.add, (multiply(unit, "dgrad", d, w, offsets) for d, w in pairs))
    (dx,) = jax.vjp(to_rows, x)[1](drows)
    if "wgrad" in recipe.half:
        rows, dy, (dgate, dup), (unit_rows,) = to_rows(x), to_rows(dout), dpre.plain, h.plain
    else:
        rows = _columns_of_tokens(spec, x, recipe.lhs, routing, _amax(recipe.lhs, x, routing))
        dy = _columns_of_tokens(spec, dout, recipe.dout, routing, amax)
        (dgate, dup), (unit_rows,) = dpre.cols, h.cols
    triples = (unit, rows, dgate), (unit, rows, dup), (down, unit_rows, dy)
    dexperts = tuple(multiply(part, "wgrad", a, d, offsets, dh.shape[0]) for part, a, d in triples)
    return dx.astype(spec.x_dtype), dexperts, partial_routing(weights=sums_of_choices(dots, routing))


mlp_fp8 = differentiable(_forward, _fwd, _bwd, static=1)
