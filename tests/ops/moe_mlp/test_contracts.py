"""What the forward keeps, and what the backward recomputes. Several devices: tests/nn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from tests.ops.moe_mlp.cases import SHARD, clean, compiled, make_case, mlp

pytestmark = pytest.mark.versions

CASE = clean(make_case(SHARD))
ROUTING, OPERANDS = CASE["routing"], (CASE["x"], CASE["routing"].weights, CASE["w_gate"], CASE["w_up"], CASE["w_down"])


@pytest.mark.parametrize(("save", "kept"), [("preactivations", 2), ("nothing", 0)])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_what_the_forward_keeps(compute_dtype, save, kept):
    """Of the rows gate and up, or nothing; beside them x in the compute dtype, the routing, and the experts as they
    are: cast ones would be a second copy of all layers' weights in a scan."""

    def f(x, weights, *experts):
        routing, options = dataclasses.replace(ROUTING, weights=weights), {"save": save, "compute_dtype": compute_dtype}
        return mlp(SHARD, "xla", x, *experts, routing, **options)

    _, vjp = jax.eval_shape(functools.partial(jax.vjp, f), *OPERANDS)
    R, places = SHARD.T * SHARD.k, (SHARD.T, SHARD.k)
    found = [
        (leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(vjp) if len(leaf.shape) > 1 and leaf.shape != places
    ]
    operands = [(CASE["x"].shape, compute_dtype)]
    operands += [(CASE[name].shape, "float32") for name in ("w_gate", "w_up", "w_down")]
    assert sorted(found) == sorted(operands + kept * [((R, SHARD.F), compute_dtype)])


@pytest.mark.parametrize(("save", "products"), [("preactivations", 9), ("nothing", 11)])
def test_what_is_not_kept_is_made_again(save, products):
    """Loops over tiles: three forward; backward one for the down projection's rows, two for x, three for the experts,
    and two to recompute gate and up. One barrier keeps XLA from sharing the recomputation and the rows' copy with the
    forward, another delays the copy of x's rows until other copies are dead."""
    text = compiled("xla", dataclasses.replace(SHARD, save=save)).lower(CASE).as_text()
    assert (text.count("stablehlo.while"), text.count("stablehlo.optimization_barrier")) == (products, 2)


def test_experts_that_are_not_trained_get_no_products():
    """Of the nine loops, the forward's and those of x's gradient are left."""

    def step(x):
        return jnp.sum(mlp(SHARD, "xla", x, *(CASE[name] for name in ("w_gate", "w_up", "w_down")), ROUTING) ** 2)

    assert jax.jit(jax.grad(step)).lower(CASE["x"]).compile().as_text().count(" while(") == 6
