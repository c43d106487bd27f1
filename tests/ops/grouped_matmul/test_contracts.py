"""Transformations that tests/contracts does not have: experts over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.ops.grouped_matmul.reference import grouped_matmul_reference
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.grouped_matmul.cases import KERNELS, make_case, plan_of

pytestmark = pytest.mark.versions

SIZES = [9, 0, 21, 2]
CASE = make_case(SIZES, 16, 24, before=3, after=5)


def reference_loss(lhs, rhs, offsets):
    return jnp.sum(jnp.sin(grouped_matmul_reference(lhs, rhs, offsets)))


CLEAN_LHS = put(np.where(CASE.outside, 0, CASE.lhs))
# Compiled whole: operation by operation, JAX would compile every one of them.
reference_gradients = jax.jit(jax.value_and_grad(reference_loss, argnums=(0, 1)))


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_shard_map_over_experts(backend):
    """Each device holds a slice of the experts and of the offsets; the gradient of replicated rows is a psum."""
    devices = jax.device_count()
    if devices < 2:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh((2,), ("e",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))

    def shard(lhs, rhs, offsets):
        mine = jax.lax.dynamic_slice_in_dim(offsets, jax.lax.axis_index("e") * 2, 3)
        plan = plan_of("xla" if backend == "xla" else "interpret")
        return jax.lax.psum(jaxops.grouped_matmul(lhs, rhs, mine, precision="highest", plan=plan), "e")

    # Pallas' interpreter cannot follow varying axes; the kernels' own types are checked by lowering, below.
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("e"), P()), out_specs=P(), check_vma=backend == "xla")
    got = jax.jit(
        jax.value_and_grad(lambda lhs, rhs: jnp.sum(jnp.sin(sharded(lhs, rhs, CASE.offsets))), argnums=(0, 1))
    )(CLEAN_LHS, CASE.rhs)
    want = reference_gradients(CLEAN_LHS, CASE.rhs, CASE.offsets)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, "float32", scale=10)


@pytest.mark.parametrize("run", KERNELS)
def test_donation_aliases_the_accumulator(run):
    accumulator = jnp.zeros((4, 16, 24), jnp.float32)
    step = jax.jit(
        lambda acc: jaxops.grouped_wgrad(CASE.lhs, CASE.dout, CASE.offsets, accumulate_into=acc, plan=plan_of(run)),
        donate_argnums=0,
    )
    compiled = step.lower(accumulator).compile()
    assert "input_output_alias" in compiled.as_text()
    out = compiled(accumulator)
    assert accumulator.is_deleted()
    assert out.shape == (4, 16, 24)
