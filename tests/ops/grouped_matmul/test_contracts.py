"""The contracts of every op: transformations, determinism, no host work, no recompilation."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.ops.grouped_matmul.reference import grouped_matmul_reference
from tests.compare import assert_close
from tests.hopper import H200
from tests.ops.grouped_matmul.cases import KERNELS, RUNS, make_case, plan_of

SIZES = [9, 0, 21, 2]
CASE = make_case(SIZES, 16, 24, before=3, after=5)


def matmul(run, lhs, rhs, offsets, **kwargs):
    return jaxops.grouped_matmul(lhs, rhs, offsets, precision="highest", plan=plan_of(run), **kwargs)


def loss(run, lhs, rhs, offsets):
    return jnp.sum(jnp.sin(matmul(run, lhs, rhs, offsets)))


def reference_loss(lhs, rhs, offsets):
    return jnp.sum(jnp.sin(grouped_matmul_reference(lhs, rhs, offsets)))


CLEAN_LHS = jnp.asarray(np.where(CASE.outside, 0, CASE.lhs))
# Compiled whole: operation by operation, JAX would compile every one of them.
reference_gradients = jax.jit(jax.value_and_grad(reference_loss, argnums=(0, 1)))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (None, None, 0)], ids=["all", "lhs", "offsets"])
def test_vmap(run, in_axes):
    others = [
        make_case(sizes, 16, 24, before=before, after=after, seed=1) for sizes, before, after in ([SIZES, 3, 5], [[0, 30, 0, 2], 8, 0], [[0, 0, 0, 0], 40, 0])
    ]
    arrays = [(c.lhs, c.rhs, c.offsets) for c in others]
    stacked = [np.stack(x) if axis == 0 else np.asarray(x[0]) for axis, x in zip(in_axes, zip(*arrays, strict=True), strict=True)]
    stacked[0] = np.nan_to_num(stacked[0])
    grad = jax.vmap(jax.value_and_grad(functools.partial(loss, run), argnums=(0, 1)), in_axes=in_axes)
    got = jax.jit(grad)(*stacked)
    for i in range(3):
        one = [x[i] if axis == 0 else x for axis, x in zip(in_axes, stacked, strict=True)]
        want = reference_gradients(*one)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_close(g[i], w, "float32", scale=10)


@pytest.mark.parametrize("run", RUNS)
def test_remat_and_scan(run):
    """A scan over layers with rematerialised bodies: forward and backward as without."""
    layers = jnp.stack([jnp.pad(CASE.rhs, ((0, 0), (0, 8), (0, 0))) * s for s in (0.3, 0.2)])  # [L, G, 24, 24]
    x = jnp.pad(CLEAN_LHS, ((0, 0), (0, 8)))

    def stack(matmul, x, layers):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(matmul(x, w, CASE.offsets)), None))
        return jnp.sum(jax.lax.scan(body, x, layers)[0] ** 2)

    got = jax.jit(jax.value_and_grad(functools.partial(stack, functools.partial(matmul, run)), argnums=(0, 1)))(x, layers)
    want = jax.jit(jax.value_and_grad(functools.partial(stack, grouped_matmul_reference), argnums=(0, 1)))(x, layers)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, "float32", scale=10)


@pytest.mark.parametrize("run", ["xla", "interpret"])
def test_second_order(run):
    def directional(f, rhs):
        return jnp.sum(jax.grad(f, argnums=1)(CLEAN_LHS, rhs, CASE.offsets) ** 2)

    got = jax.jit(jax.grad(lambda rhs: directional(functools.partial(loss, run), rhs)))(CASE.rhs)
    assert_close(got, jax.jit(jax.grad(lambda rhs: directional(reference_loss, rhs)))(CASE.rhs), "float32", scale=20)


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_shard_map_over_experts(backend):
    """Every device holds a slice of the experts and takes its slice of the global offsets; replicated tokens' gradient is summed over devices."""
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
    got = jax.jit(jax.value_and_grad(lambda lhs, rhs: jnp.sum(jnp.sin(sharded(lhs, rhs, CASE.offsets))), argnums=(0, 1)))(CLEAN_LHS, CASE.rhs)
    want = reference_gradients(CLEAN_LHS, CASE.rhs, CASE.offsets)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, "float32", scale=10)


@pytest.mark.parametrize("backend", ["pallas", "triton"])
def test_shard_map_checks_the_kernels_varying_axes(backend):
    """check_vma=True traces the kernels' three passes with replicated weights: the gradient's psum is JAX's own."""
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)
    if backend == "triton":
        pytest.importorskip("jax_triton")
    plan = plan_of("gpu" if backend == "pallas" else "triton")

    def shard(lhs, rhs, offsets):
        def f(lhs, rhs):
            return jnp.sum(jaxops.grouped_matmul(lhs, rhs, offsets[0], plan=plan))

        return jax.grad(f, argnums=(0, 1))(lhs, rhs)

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=(P("d"), P()))
    s = jax.ShapeDtypeStruct
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(sharded)(s((64, 32), jnp.bfloat16), s((4, 32, 48), jnp.bfloat16), s((2, 5), jnp.int32)))
    assert "psum" in text
    assert text.count("grouped_matmul_wgrad") >= 1


@pytest.mark.parametrize("run", KERNELS)
def test_donation_aliases_the_accumulator(run):
    accumulator = jnp.zeros((4, 16, 24), jnp.float32)
    step = jax.jit(lambda acc: jaxops.grouped_wgrad(CASE.lhs, CASE.dout, CASE.offsets, accumulate_into=acc, plan=plan_of(run)), donate_argnums=0)
    compiled = step.lower(accumulator).compile()
    assert "input_output_alias" in compiled.as_text()
    out = compiled(accumulator)
    assert accumulator.is_deleted()
    assert out.shape == (4, 16, 24)


@pytest.mark.parametrize("run", RUNS)
def test_two_runs_give_the_same_bits(run):
    f = jax.jit(jax.value_and_grad(functools.partial(loss, run), argnums=(0, 1)))
    first, second = (jax.tree.leaves(f(CLEAN_LHS, CASE.rhs, CASE.offsets)) for _ in range(2))
    assert [np.asarray(x).tobytes() for x in first] == [np.asarray(x).tobytes() for x in second]


@functools.cache
def training_step(run):
    def step(rhs, lhs, offsets):
        value, grad = jax.value_and_grad(lambda rhs: loss(run, lhs, rhs, offsets))(rhs)
        return rhs - 0.01 * grad, value

    return jax.jit(step, donate_argnums=0)


@pytest.mark.parametrize("run", RUNS)
def test_no_host_work(run):
    """The compiled step calls nothing on the host and copies nothing to it, and runs where transfers are refused."""
    step = training_step(run)
    text = step.lower(CASE.rhs, CLEAN_LHS, CASE.offsets).compile().as_text()
    assert not re.search(r"callback|outfeed|infeed|send\(|recv\(|copy-start|S\(5\)", text)
    rhs = jnp.array(CASE.rhs)
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            rhs, value = step(rhs, CLEAN_LHS, CASE.offsets)
    assert np.isfinite(float(value))


@pytest.mark.parametrize("run", RUNS)
def test_a_hundred_routings_compile_once(run):
    step = training_step(run)
    rng = np.random.default_rng(0)
    rhs, _ = step(jnp.array(CASE.rhs), CLEAN_LHS, CASE.offsets)
    compiled = step._cache_size()
    for _ in range(100 if run != "interpret" else 10):
        offsets = jnp.asarray(np.sort(rng.integers(0, 41, size=5)), jnp.int32)
        rhs, _ = step(rhs, CLEAN_LHS, offsets)
    assert step._cache_size() == compiled


@pytest.mark.parametrize("run", RUNS)
def test_precision_follows_the_configuration(run):
    """precision=None is what x @ w does under jax_default_matmul_precision; "highest" is float32 to the last few bits. Not under jit."""
    case = make_case([40, 24], 512, 16)
    with jax.default_matmul_precision("highest"):
        got = jaxops.grouped_matmul(case.lhs, case.rhs, case.offsets, plan=plan_of(run))
    assert_close(got, jax.jit(grouped_matmul_reference)(case.lhs, case.rhs, case.offsets), "float32")


@pytest.mark.parametrize("run", RUNS)
def test_under_x64(run):
    """Sums of int32 are int64 there, and the work lists' columns must not be."""
    was = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        value, gradients = jax.jit(jax.value_and_grad(functools.partial(loss, run), argnums=(0, 1)))(CLEAN_LHS, CASE.rhs, CASE.offsets)
    finally:
        jax.config.update("jax_enable_x64", was)
    assert value.dtype == jnp.float32
    for got, want in zip(gradients, reference_gradients(CLEAN_LHS, CASE.rhs, CASE.offsets)[1], strict=True):
        assert_close(got, want, "float32", scale=10)
