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
from jaxops.ops.grouped_matmul import Tiles
from jaxops.ops.modality_grouped_matmul import Plan
from jaxops.ops.modality_grouped_matmul.reference import modality_grouped_matmul_reference
from tests.compare import assert_close
from tests.hopper import H200, lower_for_h200
from tests.ops.modality_grouped_matmul.cases import RUNS, make_case

SHAPES = ((2, 16, 24), (1, 24, 8))
CASE = make_case([9, 0, 21], SHAPES, before=3, after=5)
CLEAN_LHS = jnp.where(CASE.there(1), CASE.lhs, 0)
ONE, OTHER = Tiles(16, 16, 16), Tiles(32, 16, 16)
WIDE, TURNS = Tiles(128, 256, 64, 8, 3, kernel="triton", dynamic=True), Tiles(128, 128, 64, 8, 3, kernel="triton", turns=True)
PLANS = {
    "xla": Plan("xla"),
    "interpret": Plan("pallas", (ONE, OTHER), (ONE, ONE), (ONE, ONE)),
    "gpu": Plan("pallas", *((Tiles(64, 32, 32), Tiles(32, 32, 32)),) * 3),
    "triton": Plan("triton", (WIDE, TURNS), (WIDE, WIDE), (WIDE, WIDE)),
}
HOPPER_RUNS = [*RUNS, pytest.param("triton", marks=pytest.mark.gpu)]


def of_run(run: str):
    """In bfloat16 where the kernels know no float32: then the reference's own operands and results are rounded."""
    dtype = jnp.bfloat16 if run == "triton" else None
    return functools.partial(jaxops.modality_grouped_matmul, precision="highest", plan=PLANS[run], compute_dtype=dtype)


def loss(matmul, lhs, rhs, offsets):
    return jnp.sum(jnp.sin(matmul(lhs, rhs, offsets)))


@functools.cache
def gradients(run: str):
    """Compiled whole: operation by operation, JAX would compile every one of them."""
    matmul = modality_grouped_matmul_reference if run == "reference" else of_run(run)
    return jax.jit(jax.value_and_grad(functools.partial(loss, matmul), argnums=(0, 1)))


def assert_same(got, want, run: str, scale: float = 10) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, "bfloat16" if run == "triton" else "float32", scale=scale)


@pytest.mark.parametrize("run", HOPPER_RUNS)
def test_vmap(run):
    """Over rows and offsets; the matrices are shared."""
    others = [make_case(sizes, SHAPES, before=b, after=a, seed=1) for sizes, b, a in (([9, 0, 21], 3, 5), ([0, 30, 0], 8, 0), ([0, 0, 38], 0, 0))]
    lhs, offsets = (np.stack([np.asarray(getattr(c, name)) for c in others]) for name in ("lhs", "offsets"))
    lhs = np.nan_to_num(lhs)
    got = jax.jit(jax.vmap(jax.value_and_grad(functools.partial(loss, of_run(run)), argnums=(0, 1)), in_axes=(0, None, 0)))(lhs, CASE.rhs, offsets)
    for i in range(3):
        assert_same(jax.tree.map(lambda x, i=i: x[i], got), gradients("reference")(lhs[i], CASE.rhs, offsets[i]), run)


@pytest.mark.parametrize("run", ["xla", *HOPPER_RUNS[2:]])
def test_remat_and_scan(run):
    """A scan over layers, up and down again, with rematerialised bodies."""
    layers = tuple(jnp.stack([0.3 * w, 0.2 * w]) for w in CASE.rhs)

    def stack(matmul, x, layers):
        body = jax.checkpoint(lambda x, rhs: (jnp.tanh(matmul(matmul(x, rhs, CASE.offsets), [jnp.swapaxes(w, 1, 2) for w in rhs], CASE.offsets)), None))
        return jnp.sum(jax.lax.scan(body, x, layers)[0] ** 2)

    f = lambda matmul: jax.jit(jax.value_and_grad(functools.partial(stack, matmul), argnums=(0, 1)))(CLEAN_LHS, layers)
    assert_same(f(of_run(run)), f(modality_grouped_matmul_reference), run)


@pytest.mark.parametrize("run", ["xla", pytest.param("interpret", marks=pytest.mark.gpu), *HOPPER_RUNS[3:]])
def test_second_order(run):
    def directional(f, lhs, rhs):
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f, argnums=(0, 1))(lhs, rhs, CASE.offsets)))

    f = lambda matmul: jax.jit(jax.grad(functools.partial(directional, functools.partial(loss, matmul)), argnums=(0, 1)))(CLEAN_LHS, CASE.rhs)
    assert_same(f(of_run(run)), f(modality_grouped_matmul_reference), run, scale=20)


def test_shard_map():
    """Each device has half of the rows, with offsets of its own, and all matrices: their gradients are summed over the devices."""
    if jax.device_count() < 2:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    offsets = jnp.array([[0, 4, 9, 15], [2, 2, 10, 19]], jnp.int32)
    lhs = jnp.asarray(np.random.default_rng(0).normal(size=CLEAN_LHS.shape), jnp.float32)

    def whole(matmul, lhs, rhs):
        return jax.shard_map(lambda lhs, rhs, offsets: matmul(lhs, rhs, offsets[0]), mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=P("d"))(
            lhs, rhs, offsets
        )

    def halves(matmul, lhs, rhs):
        return jnp.concatenate([matmul(x, rhs, o) for x, o in zip(jnp.split(lhs, 2), offsets, strict=True)])

    def of(split, matmul):
        return jax.jit(jax.value_and_grad(lambda lhs, rhs: jnp.sum(jnp.sin(split(matmul, lhs, rhs))), argnums=(0, 1)))(lhs, CASE.rhs)

    assert_same(of(whole, of_run("xla")), of(halves, modality_grouped_matmul_reference), "xla")


@pytest.mark.parametrize("backend", ["pallas", "triton"])
def test_shard_map_checks_the_kernels_varying_axes(backend):
    """check_vma=True traces the kernels' three passes with replicated matrices: the gradients' psum is JAX's own."""
    if backend == "triton":
        pytest.importorskip("jax_triton")
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)

    def shard(lhs, rhs, offsets):
        return jax.grad(lambda lhs, rhs: jnp.sum(jaxops.modality_grouped_matmul(lhs, rhs, offsets[0], backend=backend)), argnums=(0, 1))(lhs, rhs)

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=(P("d"), P()))
    s = jax.ShapeDtypeStruct
    with jax.sharding.use_abstract_mesh(mesh):
        given = s((512, 24), jnp.bfloat16), tuple(s(shape, jnp.bfloat16) for shape in SHAPES), s((2, 4), jnp.int32)
        text = str(jax.make_jaxpr(sharded)(*given))
    assert text.count("psum") >= 2
    assert "modality_grouped_matmul_wgrad" in text


@pytest.mark.parametrize("run", HOPPER_RUNS)
def test_a_training_step(run):
    """It calls nothing on the host, copies nothing to it, runs where transfers are refused, gives the same bits twice, and new offsets do not recompile it."""
    step = gradients(run)
    text = step.lower(CLEAN_LHS, CASE.rhs, CASE.offsets).compile().as_text()
    assert not re.search(r"callback|outfeed|infeed|send\(|recv\(|copy-start|S\(5\)", text)
    with jax.transfer_guard("disallow"):
        first, second = (step(CLEAN_LHS, CASE.rhs, CASE.offsets) for _ in range(2))
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(first)] == [np.asarray(x).tobytes() for x in jax.tree.leaves(second)]
    assert_same(first, gradients("reference")(CLEAN_LHS, CASE.rhs, CASE.offsets), run)
    compiled, rng = step._cache_size(), np.random.default_rng(0)
    for _ in range(5):
        step(CLEAN_LHS, CASE.rhs, jnp.asarray(np.sort(rng.integers(0, 39, size=4)), jnp.int32))
    assert step._cache_size() == compiled


@pytest.mark.parametrize("run", RUNS)
def test_under_x64(run):
    """Sums of int32 are int64 there, and the work lists' columns must not be."""
    was = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        value, found = jax.jit(jax.value_and_grad(functools.partial(loss, of_run(run)), argnums=(0, 1)))(CLEAN_LHS, CASE.rhs, CASE.offsets)
    finally:
        jax.config.update("jax_enable_x64", was)
    assert value.dtype == jnp.float32
    assert_same(found, gradients("reference")(CLEAN_LHS, CASE.rhs, CASE.offsets)[1], run)


def test_the_result_is_written_in_place():
    """Launches after the first write to its result: nothing is put together afterwards."""
    s, wide, high = jax.ShapeDtypeStruct, Tiles(64, 64, 32), Tiles(128, 64, 32)
    plan = Plan("pallas", (wide, high, wide))
    shapes = ((2, 64, 128), (1, 32, 64), (3, 64, 64))
    text = lower_for_h200(
        lambda lhs, rhs, offsets: jaxops.modality_grouped_matmul(lhs, rhs, offsets, plan=plan),
        s((256, 64), jnp.bfloat16), tuple(s(shape, jnp.bfloat16) for shape in shapes), s((7,), jnp.int32),
    )  # fmt: skip
    calls = [line for line in text.splitlines() if "custom_call" in line]
    assert len(calls) == 4  # of each launch the work list, and the product
    assert [("operand_index = 3" in call or "operand_index = 4" in call) for call in calls] == [False, False, False, True]
    others = [line for line in text.splitlines() if " stablehlo." in line and "custom_call" not in line]
    assert not others, others


def test_dgrad_has_tiles_of_its_own():
    """Whichever way the matrices lie: the forward of one is the other's dgrad."""
    s, (fwd, dgrad, wgrad) = jax.ShapeDtypeStruct, (Tiles(64, 64, 32, warps) for warps in (2, 4, 8))
    plan = Plan("pallas", (fwd,) * 2, (dgrad,) * 2, (wgrad,) * 2)
    for transpose_rhs in (False, True):
        shapes = tuple((G, n, k) if transpose_rhs else (G, k, n) for G, k, n in SHAPES)

        def gradients(lhs, rhs, offsets, transpose_rhs=transpose_rhs):
            f = lambda lhs, rhs: jnp.sum(jnp.sin(jaxops.modality_grouped_matmul(lhs, rhs, offsets, transpose_rhs=transpose_rhs, plan=plan)))
            return jax.grad(f, argnums=(0, 1))(lhs, rhs)

        text = lower_for_h200(gradients, s((64, 24), jnp.float32), tuple(s(shape, jnp.float32) for shape in shapes), s((4,), jnp.int32))
        found = dict(re.findall(r'name = "modality_grouped_matmul_(\w+)".*?num_warps = (\d)', text))
        assert found == {"dgrad" if transpose_rhs else "fwd": "2", "fwd" if transpose_rhs else "dgrad": "4", "wgrad": "8"}
