"""Several devices; what the forward keeps, and what the backward recomputes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.compare import assert_close
from tests.ops.moe_mlp.cases import NAMES, SHARD, clean, compiled, make_case, mlp

pytestmark = pytest.mark.versions

CASE = clean(make_case(SHARD))
ROUTING, OPERANDS = CASE["routing"], (CASE["x"], CASE["routing"].weights, CASE["w_gate"], CASE["w_up"], CASE["w_down"])


def loss(run, x, weights, *experts, routing=ROUTING, variant=SHARD):
    return jnp.sum(jnp.sin(mlp(variant, run, x, *experts, dataclasses.replace(routing, weights=weights))))


def assert_all_close(got, want, scale=5.0) -> None:
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, "float32", jax.tree_util.keystr(path), scale=scale)


@functools.cache
def reference_gradients():
    # Compiled whole: operation by operation, JAX would compile every one of them.
    return jax.jit(jax.value_and_grad(functools.partial(loss, "reference"), argnums=(0, 1, 2, 3, 4)))(*OPERANDS)


def test_shard_map_over_experts():
    """Each device has all tokens and a slice of the offsets; the devices' results add up to the whole."""
    if jax.device_count() < 2:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh((2,), ("e",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))

    def shard(x, weights, *experts):
        mine = jax.lax.dynamic_slice_in_dim(ROUTING.group_offsets, jax.lax.axis_index("e") * 2, 3)
        return jax.lax.psum(
            mlp(SHARD, "xla", x, *experts, dataclasses.replace(ROUTING, weights=weights, group_offsets=mine)), "e"
        )

    specs = (P(), P(), P("e"), P("e"), P("e"))
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P())
    got = jax.jit(jax.value_and_grad(lambda *operands: jnp.sum(jnp.sin(sharded(*operands))), argnums=(0, 1, 2, 3, 4)))(
        *OPERANDS
    )
    assert_all_close(got, reference_gradients())


@pytest.mark.parametrize(("save", "kept"), [("preactivations", 2), ("nothing", 0)])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_what_the_forward_keeps(compute_dtype, save, kept):
    """Of the rows gate and up, or nothing; beside them x and the experts in the compute dtype, and the routing."""

    def f(x, weights, *experts):
        return mlp(
            SHARD,
            "xla",
            x,
            *experts,
            dataclasses.replace(ROUTING, weights=weights),
            save=save,
            compute_dtype=compute_dtype,
        )

    _, vjp = jax.eval_shape(functools.partial(jax.vjp, f), *OPERANDS)
    R, places = SHARD.T * SHARD.k, (SHARD.T, SHARD.k)
    found = [
        (leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(vjp) if len(leaf.shape) > 1 and leaf.shape != places
    ]
    operands = [(CASE[name].shape, compute_dtype) for name in ("x", "w_gate", "w_up", "w_down")]
    assert sorted(found) == sorted(operands + kept * [((R, SHARD.F), compute_dtype)])


@pytest.mark.parametrize(("save", "products"), [("preactivations", 9), ("nothing", 11)])
def test_what_is_not_kept_is_made_again(save, products):
    """Loops over tiles: three forward; backward one for the down projection's rows, two for x, three for the experts,
    and two to recompute gate and up. One barrier keeps XLA from sharing the recomputation and the rows' copy with the
    forward, another delays the copy of x's rows until other copies are dead."""
    step = jax.jit(
        lambda case: dict(
            zip(NAMES, compiled("xla", dataclasses.replace(SHARD, save=save))(case).values(), strict=True)
        )
    )
    text = step.lower(CASE).as_text()
    assert (text.count("stablehlo.while"), text.count("stablehlo.optimization_barrier")) == (products, 2)


def test_experts_that_are_not_trained_get_no_products():
    """Of the nine loops, the forward's and those of x's gradient are left."""

    def step(x):
        return jnp.sum(mlp(SHARD, "xla", x, *(CASE[name] for name in ("w_gate", "w_up", "w_down")), ROUTING) ** 2)

    assert jax.jit(jax.grad(step)).lower(CASE["x"]).compile().as_text().count(" while(") == 6
