"""The experts in FP8: each tensor is cast once, for all the products that read it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.differentiable import differentiable
from jaxops._lib.fp8 import Quantized
from jaxops._lib.precision import named_cast
from jaxops.ops import fp8_matmul
from jaxops.ops.fp8_matmul import Recipe, cast, cols_of, half_precision_wgrad, multiply, name_quantized, rows_of
from jaxops.ops.moe_mlp.plan import Plan
from jaxops.ops.moe_mlp.xla import sums_of_choices, unit_bwd_xla, unit_xla, weights_of_rows
from jaxops.ops.permute import combine, permute
from jaxops.ops.route import Routing, partial_routing

Experts = tuple[jax.Array, ...]  # the weights of gate, up and down


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static part of a call, beside shapes. compute_dtype is that of all values that are not in FP8."""

    plan: Plan
    recipe: Recipe
    activation: str
    save: str
    pow2_scales: bool
    compute_dtype: jnp.dtype
    out_dtype: jnp.dtype
    x_dtype: jnp.dtype
    w_dtype: jnp.dtype

    def of(self, part: str) -> fp8_matmul.Spec:
        """Of the products of one part, "unit" or "down"."""
        compute = self.compute_dtype.name
        return fp8_matmul.Spec(
            self.recipe, getattr(self.plan, part), compute, self.w_dtype.name, compute, self.pow2_scales
        )


class _Saved(NamedTuple):
    """Of a forward, what the backward reads.

    Attributes:
      gate, up: [R, F], each row's products.
      rows: x's rows in the order of experts: their column layout. With gw_hp None.
      weights: the three weights' row layouts.
    """

    gate: jax.Array
    up: jax.Array
    rows: Quantized | None
    weights: tuple[Quantized, ...]


def _run(spec: Spec, x: jax.Array, experts: Experts, routing: Routing, differentiated: bool) -> tuple[jax.Array, Any]:
    """(out [T, N], what the backward reads where the call is differentiated)."""
    unit, down, recipe, offsets = spec.of("unit"), spec.of("down"), spec.recipe, routing.group_offsets
    weights = [
        cast(part, w, recipe.rhs, "both" if differentiated else "col")[0]
        for part, w in zip((unit, unit, down), experts, strict=True)
    ]
    rows = permute(x, routing, plan=spec.plan.rows)
    layouts = "both" if differentiated and not recipe.gw_hp else "row"
    rows_q, _ = cast(unit, rows, recipe.lhs, layouts, offsets)
    gate, up = (multiply(unit, "fwd", rows_of(rows_q), cols_of(w), offsets, unit.out_dtype) for w in weights[:2])
    gate, up = checkpoint_name(gate, "moe_mlp.gate"), checkpoint_name(up, "moe_mlp.up")
    h = unit_xla(spec.activation, gate, up)
    h_q, _ = cast(down, h, recipe.lhs, "row", offsets)
    y = multiply(down, "fwd", rows_of(h_q), cols_of(weights[2]), offsets, down.out_dtype)
    out = checkpoint_name(combine(y, routing, out_dtype=spec.out_dtype, plan=spec.plan.rows), "moe_mlp.out")
    if not differentiated:
        return out, None
    kept = None if recipe.gw_hp else name_quantized(_columns(rows_q), "moe_mlp.rows")
    names = ("moe_mlp.w_gate", "moe_mlp.w_up", "moe_mlp.w_down")
    return out, _Saved(gate, up, kept, tuple(map(name_quantized, map(_rows, weights), names)))


def _columns(q: Quantized) -> Quantized:
    return dataclasses.replace(q, values=None, scales=None)


def _rows(q: Quantized) -> Quantized:
    """Without the column layout; a weight that has only that one is transposed where it is read."""
    return q if q.values is None else dataclasses.replace(q, values_t=None, scales_t=None)


def _forward(spec: Spec, x: jax.Array, experts: Experts, routing: Routing) -> jax.Array:
    return _run(spec, x.astype(spec.compute_dtype), experts, routing, False)[0]


def _fwd(spec: Spec, x: jax.Array, experts: Experts, routing: Routing):
    x = named_cast(x, spec.compute_dtype, "moe_mlp.x")
    out, saved = _run(spec, x, experts, routing, True)
    # With save="nothing" the weights are cast again: they are kept anyway, as parameters.
    return out, (x, experts if spec.save == "nothing" else None, routing, None if spec.save == "nothing" else saved)


def _bwd(spec: Spec, residuals, dout: jax.Array):
    x, experts, routing, saved = residuals
    # Not before dout exists: XLA would share the rows' copy or the products with the forward, and keep them.
    x, dout = lax.optimization_barrier((x, dout))
    if saved is None:
        _, saved = _run(spec, x, experts, routing, True)
    unit, down, recipe, offsets = spec.of("unit"), spec.of("down"), spec.recipe, routing.group_offsets
    layouts = "row" if recipe.gw_hp else "both"

    dy = permute(dout.astype(spec.compute_dtype), routing, plan=spec.plan.rows)
    dy_q, _ = cast(down, dy, recipe.dout, layouts, offsets)
    dh = multiply(down, "dgrad", rows_of(dy_q), rows_of(saved.weights[2]), offsets, down.out_dtype)
    dgate, dup, h, dots = unit_bwd_xla(spec.activation, dh, saved.gate, saved.up, weights_of_rows(routing))

    halves = [cast(unit, d, recipe.dout, layouts, offsets)[0] for d in (dgate, dup)]
    drows = [
        multiply(unit, "dgrad", rows_of(d), rows_of(w), offsets, unit.out_dtype).astype(jnp.float32)
        for d, w in zip(halves, saved.weights[:2], strict=True)
    ]
    _, rows_to_tokens = jax.vjp(lambda x: permute(x, routing, plan=spec.plan.rows), x)
    (dx,) = rows_to_tokens((drows[0] + drows[1]).astype(spec.compute_dtype))

    if recipe.gw_hp:
        rows = permute(x, routing, plan=spec.plan.rows)
        triples = ((unit, rows, dgate), (unit, rows, dup), (down, h, dy))
        dexperts = tuple(half_precision_wgrad(part, a, d, offsets) for part, a, d in triples)
    else:
        assert saved.rows is not None
        h_q, _ = cast(down, h, recipe.lhs, "col", offsets)
        triples = ((unit, saved.rows, halves[0]), (unit, saved.rows, halves[1]), (down, h_q, dy_q))
        dexperts = tuple(
            multiply(part, "wgrad", cols_of(a), cols_of(d), offsets, part.rhs_dtype, dy.shape[0])
            for part, a, d in triples
        )
    return dx.astype(spec.x_dtype), dexperts, partial_routing(weights=sums_of_choices(dots, routing))


mlp_fp8 = differentiable(_forward, _fwd, _bwd, static=1)
