"""Under JAX's transformations, on devices side by side, and that nothing of it reaches the host."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.ops.quantize import Plan
from tests.hopper import H200
from tests.ops.quantize.cases import RUNS, Variant, backend_of, bits_of, compiled, make_x

pytestmark = pytest.mark.versions

X = make_x((40, 133), "float32", seed=1)
LOOKS_FIRST = Variant("tensorwise", "row")  # two kernels, and a scale in which a neighbour would show


def assert_same(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits_of(a), bits_of(b))


@pytest.mark.parametrize("run", RUNS)
def test_vmap_and_scan(run):
    """Each alike, and like a call by itself."""
    f = compiled(run, LOOKS_FIRST)
    xs = np.stack([X, np.asarray(X)[::-1] / 3])
    want = jax.tree.map(lambda *leaves: np.stack(leaves), *(f(x) for x in xs))
    for got in jax.jit(lambda xs: (jax.vmap(f)(xs), jax.lax.scan(lambda carry, x: (carry, f(x)), 0, xs)[1]))(xs):
        assert_same(got, want)


@pytest.mark.parametrize("run", ["xla", "interpret"])
@pytest.mark.parametrize("call", ["grad", "vjp of a stack", "measured"])
def test_no_gradient(run, call):
    """A cast's gradient is the product's business: an error says so, and stop_gradient is let through."""
    plan = Plan(backend_of(run))
    quantize = {
        "grad": lambda x: jaxops.quantize(x, plan=plan).scales.sum(),
        "vjp of a stack": lambda x: jaxops.dequantize(jaxops.quantize(x[None], scaling="rowwise", plan=plan)).sum(),
        "measured": lambda x: jaxops.ops.quantize.quantize_measured(x, plan=plan)[1],
    }[call]
    with pytest.raises(
        NotImplementedError, match=r"float8_e4m3fn has no gradient of its own.*jaxops\.fp8_matmul.*stop_gradient"
    ):
        jax.eval_shape(jax.grad(quantize), X)
    jax.eval_shape(jax.grad(lambda x: quantize(jax.lax.stop_gradient(x)) + x.sum()), X)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "block_1x128"])
def test_shard_map_checks_the_kernels_varying_axes(scaling):
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)

    def shard(x, offsets, key):
        q = jaxops.quantize(x, scaling=scaling, layouts="both", group_offsets=offsets[0], key=key)
        return q.values, q.values_t

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P("d"), P("d"), P()), out_specs=(P("d"), P(None, "d")))
    s = jax.ShapeDtypeStruct
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(sharded)(s((64, 32), "bfloat16"), s((2, 5), "int32"), s((2,), "uint32")))
    assert "quantize_cast" in text
    assert "schedule_rows" in text
