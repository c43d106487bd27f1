"""What the ops ask of operands on a mesh."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops

pytestmark = pytest.mark.versions

OFFSETS = jnp.array([0, 3, 8], jnp.int32)


@pytest.mark.parametrize("spec", [P("d"), P()], ids=["sharded", "replicated"])
def test_a_mesh_with_explicit_axes(spec):
    """The default of `jax.make_mesh`: an error that says what to write, and shard_map works."""
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(AxisType.Explicit,))
    x, w = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, spec)), jnp.ones((2, 4, 5))
    for call in (jaxops.grouped_matmul, jax.jit(jaxops.grouped_matmul)):
        with pytest.raises(
            ValueError, match=r"float32\[8.*Explicit axes, \('d',\): call inside jax.shard_map, or .*AxisType.Auto"
        ):
            call(x, w, OFFSETS)
    inside = jax.shard_map(
        lambda x: jaxops.grouped_matmul(x, w, OFFSETS // 2), mesh=mesh, in_specs=spec, out_specs=spec
    )
    assert jax.jit(inside)(x).shape == (8, 5)


def test_a_mesh_with_auto_axes():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("d")))
    assert jax.jit(jaxops.grouped_matmul)(x, jnp.ones((2, 4, 5)), OFFSETS).sharding.mesh == mesh
