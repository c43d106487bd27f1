"""The contracts of every op: transformations, determinism, no host work, no recompilation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.compare import assert_close
from tests.ops.permute.cases import SHARD, Variant, combine, compiled, make_case, permute

pytestmark = pytest.mark.versions

CASE = make_case(SHARD)
ROUTING = dataclasses.replace(CASE["routing"], weights=jnp.nan_to_num(CASE["routing"].weights))


def layer(run, x, weights, routing=ROUTING, variant=SHARD):
    """Tokens to their experts, which bend them, and back."""
    return combine(
        variant, run, jnp.sin(3 * permute(variant, run, x, routing)), dataclasses.replace(routing, weights=weights)
    )


def assert_all_close(got, want, scale=2.0) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, "float32", scale=scale)


@pytest.mark.parametrize("run", ["xla", "interpret"])
def test_shard_map_over_experts(run):
    """Each device has all tokens and a slice of the offsets; the devices' results add up to the whole."""
    if jax.device_count() < 4:
        pytest.skip("needs several devices")
    variant = Variant(E=8)
    case = make_case(variant)
    routing = case["routing"]
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))

    def shard(x, routing):
        offsets = jax.lax.dynamic_slice(routing.group_offsets, (2 * jax.lax.axis_index("d"),), (3,))
        mine = dataclasses.replace(routing, group_offsets=offsets)
        return jax.lax.psum(layer(run, x, routing.weights, mine, variant), "d")

    # Pallas' interpreter cannot follow varying axes; the kernels' own types are checked by lowering, below.
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=run == "xla")

    def total(apply, x, weights):
        return jnp.sum(jnp.sin(apply(x, dataclasses.replace(routing, weights=weights))))

    def whole(x, routing):
        return layer("reference", x, routing.weights, routing, variant)

    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(total, f), argnums=(0, 1)))(case["x"], routing.weights)
        for f in (sharded, whole)
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert_all_close(got[1], want[1], scale=5)


def test_the_portable_backend_adds_without_scatter():
    """Whose order is anyone's on a GPU."""
    assert "scatter-add" not in str(jax.make_jaxpr(compiled("xla", SHARD))(CASE))
