"""Transformations that tests/contracts does not have: experts over devices, residuals, loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.ops.grouped_glu.reference import grouped_glu_reference
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.grouped_glu.cases import make_case, plan_of

pytestmark = pytest.mark.versions

SIZES = [9, 0, 21, 2]
CASE = make_case(SIZES, 12, 20, before=3, after=5)
CLEAN_X = put(np.where(CASE.outside, 0, CASE.x))
OPERANDS = (CLEAN_X, CASE.w_gate, CASE.w_up, CASE.offsets)


def glu(run, *operands, **options):
    return jaxops.grouped_glu(*operands, precision="highest", plan=plan_of(run), **options)


def loss(run, *operands, **options):
    return jnp.sum(jnp.sin(glu(run, *operands, **options)))


def reference_loss(*operands):
    return jnp.sum(jnp.sin(grouped_glu_reference(*operands)))


# Compiled whole: operation by operation, JAX would compile every one of them.
reference_gradients = jax.jit(jax.value_and_grad(reference_loss, argnums=(0, 1, 2)))


def assert_same(got, want) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, "float32", scale=10)


@pytest.mark.parametrize("run", ["xla", "interpret"])
def test_shard_map_over_experts(run):
    """Each device holds a slice of the experts and of the offsets; the gradient of replicated rows is a psum."""
    if jax.device_count() < 2:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh((2,), ("e",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))

    def shard(x, w_gate, w_up, offsets):
        mine = jax.lax.dynamic_slice_in_dim(offsets, jax.lax.axis_index("e") * 2, 3)
        return jax.lax.psum(glu(run, x, w_gate, w_up, mine), "e")

    # Pallas' interpreter cannot follow varying axes; the kernels' own types are checked by lowering, below.
    sharded = jax.shard_map(
        shard, mesh=mesh, in_specs=(P(), P("e"), P("e"), P()), out_specs=P(), check_vma=run == "xla"
    )
    got = jax.jit(jax.value_and_grad(lambda *operands: jnp.sum(jnp.sin(sharded(*operands))), argnums=(0, 1, 2)))(
        *OPERANDS
    )
    assert_same(got, reference_gradients(*OPERANDS))


@pytest.mark.parametrize(("save", "kept"), [("preactivations", 2), ("nothing", 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_forward_keeps(save, kept, dtype):
    """Beside operands in the compute dtype: gate and up in it, or nothing of their size."""
    _, vjp = jax.eval_shape(
        lambda *operands: jax.vjp(lambda x: glu("xla", x, *operands[1:], save=save, compute_dtype=dtype), operands[0]),
        *OPERANDS,
    )
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(vjp)]
    assert shapes.count(((40, 20), dtype)) == kept
    assert sum(shape == (40, 20) for shape, _ in shapes) == kept


@pytest.mark.parametrize(("save", "products"), [("preactivations", 6), ("nothing", 8)])
def test_what_is_not_kept_is_multiplied_again(save, products):
    """Two loops over tiles forward, two for dx, two for the weight gradients, and the forward's two again behind a
    barrier, as under jax.checkpoint: XLA would merge them with the first ones."""
    step = jax.jit(jax.grad(lambda *operands: loss("xla", *operands, CASE.offsets, save=save), argnums=(0, 1, 2)))
    text = step.lower(*OPERANDS[:3]).as_text()
    assert (text.count("stablehlo.while"), text.count("stablehlo.optimization_barrier")) == (
        products,
        int(save == "nothing"),
    )
