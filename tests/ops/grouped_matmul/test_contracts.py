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
from tests.hopper import H200
from tests.ops.grouped_matmul.cases import KERNELS, make_case, plan_of

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


def test_shard_map_checks_hoppers_kernels_varying_axes():
    """check_vma=True traces the kernels' three passes with replicated weights: the gradient's psum is JAX's own."""
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)
    pytest.importorskip("jax_triton")

    def shard(lhs, rhs, offsets):
        def f(lhs, rhs):
            return jnp.sum(jaxops.grouped_matmul(lhs, rhs, offsets[0], plan=plan_of("triton")))

        return jax.grad(f, argnums=(0, 1))(lhs, rhs)

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=(P("d"), P()))
    s = jax.ShapeDtypeStruct
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(
            jax.make_jaxpr(sharded)(s((64, 32), jnp.bfloat16), s((4, 32, 48), jnp.bfloat16), s((2, 5), jnp.int32))
        )
    assert "psum" in text
    assert text.count("grouped_matmul_wgrad") >= 1


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
