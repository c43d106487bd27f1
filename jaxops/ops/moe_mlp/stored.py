"""The experts with weights that are stored in FP8, and rows that are not quantized."""

import dataclasses
import functools

import jax

from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.numerics.fp8 import Quantized
from jaxops.ops.fp8_matmul import fp8_grouped_matmul, operand_of
from jaxops.ops.moe_mlp.fp8 import Fp8Spec
from jaxops.ops.moe_mlp.stored_pallas import unit_of_stored
from jaxops.ops.moe_mlp.xla import unit_xla
from jaxops.ops.permute import combine, permute
from jaxops.ops.route import Routing, partial_routing

Experts = tuple[Quantized, Quantized, Quantized]  # the weights of gate, up and down


def _run(spec: Fp8Spec, gather: bool, x: jax.Array, experts: Experts, routing: Routing) -> jax.Array:
    x, offsets, plan = x.astype(spec.compute_dtype), routing.group_offsets, spec.plan
    assert plan.unit is not None  # make_plan fills it
    multiply = functools.partial(fp8_grouped_matmul, recipe=spec.recipe.name, quantize_lhs=False)
    if gather:
        weights = operand_of(experts[0], "col"), operand_of(experts[1], "col")
        unit = functools.partial(unit_of_stored, tiles=plan.unit.fwd, interpret=plan.on.interpret)
        h = unit(x, weights, offsets, routing.row_indices, activation=spec.activation)
    else:
        rows = permute(x, routing, plan=plan.rows)
        h = unit_xla(spec.activation, *(multiply(rows, w, offsets, plan=plan.unit) for w in experts[:2]))
    y = multiply(h, experts[2], offsets, plan=plan.down)
    return combine(y, routing, out_dtype=spec.out_dtype, plan=plan.rows)


def _forward(spec: Fp8Spec, x: jax.Array, experts: Experts, routing: Routing) -> jax.Array:
    return _run(spec, bool(spec.plan.gather), x, experts, routing)


def _fwd(spec: Fp8Spec, *operands):
    return _forward(spec, *operands), operands


def _bwd(spec: Fp8Spec, operands, dout: jax.Array):
    """By JAX, of the ops one after another. The weights have no gradient."""
    x, experts, routing = operands

    def apart(x, weights):
        return _run(spec, False, x, experts, dataclasses.replace(routing, weights=weights))

    _, vjp = jax.vjp(apart, x, routing.weights)
    dx, dweights = vjp(dout)
    return dx, None, partial_routing(weights=dweights)


mlp_stored = differentiable(_forward, _fwd, _bwd, static=1)
