"""The contracts of every op: transformations, determinism, no host work, no recompilation."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxops
from tests.compare import assert_close
from tests.hopper import H200
from tests.ops.permute.cases import RUNS, SHARD, Variant, combine, compiled, make_case, permute

CASE = make_case(SHARD)
ROUTING = dataclasses.replace(CASE["routing"], weights=jnp.nan_to_num(CASE["routing"].weights))


def layer(run, x, weights, routing=ROUTING, variant=SHARD):
    """Tokens to their experts, which bend them, and back."""
    return combine(variant, run, jnp.sin(3 * permute(variant, run, x, routing)), dataclasses.replace(routing, weights=weights))


def loss(run, x, weights):
    return jnp.sum(jnp.sin(layer(run, x, weights)))


def assert_all_close(got, want, scale=2.0) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, "float32", scale=scale)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("mapped", ["all", "rows"])
def test_vmap(mapped, run):
    """Each element has its own routing, or tokens are mapped and their places are not."""
    cases = [make_case(SHARD, seed) for seed in range(2)]
    cases[1]["routing"] = cases[mapped == "all"]["routing"]
    cases[1]["rows"], cases[1]["drows"] = (cases[mapped == "all"][name] * 2 for name in ("rows", "drows"))
    stacked, axes = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases), dict.fromkeys(CASE, 0)
    if mapped == "rows":
        stacked["routing"], axes["routing"] = cases[0]["routing"], None
    got = jax.jit(jax.vmap(compiled(run, SHARD), in_axes=(axes,)))(stacked)
    for i, case in enumerate(cases):
        assert_all_close(jax.tree.map(lambda leaf, i=i: leaf[i], got), compiled(run, SHARD)(case))


@pytest.mark.parametrize("run", RUNS)
def test_remat_and_scan(run):
    """A scan over layers with rematerialised bodies: forward and backward as without."""

    def stack(run, x, weights):
        def body(x, scale):
            return x + layer(run, x, scale * weights), None

        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(body), x, jnp.array([1.0, 0.7]))[0]))

    got, want = (jax.jit(jax.value_and_grad(functools.partial(stack, name), argnums=(0, 1)))(CASE["x"], ROUTING.weights) for name in (run, "reference"))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert_all_close(got[1], want[1], scale=5)


@pytest.mark.parametrize("run", RUNS)
def test_second_order(run):
    """Of both ops, in all that has a gradient; by the same kernels."""

    def directional(run, x, weights):
        dx, dweights = jax.grad(functools.partial(loss, run), argnums=(0, 1))(x, weights)
        return jnp.sum(jnp.sin(dx)) + jnp.sum(dweights**2)

    got, want = (jax.jit(jax.grad(functools.partial(directional, name), argnums=(0, 1)))(CASE["x"], ROUTING.weights) for name in (run, "reference"))
    assert_all_close(got, want, scale=5)


@pytest.mark.parametrize("run", RUNS)
def test_forward_mode_is_refused(run):
    for op in (lambda x: permute(SHARD, run, x, ROUTING), lambda x: combine(SHARD, run, jnp.tile(x, (SHARD.k, 1)), ROUTING)):
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jit(lambda x, op=op: jax.jvp(op, (x,), (x,))).lower(CASE["x"])


@pytest.mark.parametrize("run", ["xla", "interpret"])
def test_shard_map_over_experts(run):
    """Each device has all tokens and some experts: its slice of the offsets says which. The sum over the devices is the whole."""
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

    got, want = (jax.jit(jax.value_and_grad(functools.partial(total, f), argnums=(0, 1)))(case["x"], routing.weights) for f in (sharded, whole))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert_all_close(got[1], want[1], scale=5)


def test_shard_map_checks_the_kernels_varying_axes():
    """check_vma=True traces all kernels: tokens are a device's own, the offsets everyone's."""
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)

    def shard(x, positions, indices):
        def f(x, weights):
            routing = dataclasses.replace(ROUTING, weights=weights, row_positions=positions, row_indices=indices)
            return jnp.sum(jaxops.combine(jnp.sin(jaxops.permute(x, routing)), routing))

        return jax.grad(f, argnums=(0, 1))(x, jnp.ones(positions.shape))

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P("d"), P("d"), P("d")), out_specs=(P("d"), P("d")))
    s = jax.ShapeDtypeStruct
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(sharded)(s((64, 8), "float32"), s((64, 2), "int32"), s((128,), "int32")))
    assert all(name in text for name in ("name=permute\n", "name=permute_bwd", "name=combine\n", "name=combine_bwd")), text


@pytest.mark.parametrize("run", RUNS)
def test_two_runs_give_the_same_bits(run):
    first, second = (jax.tree.leaves(compiled(run, SHARD)(CASE)) for _ in range(2))
    assert [np.asarray(x).tobytes() for x in first] == [np.asarray(x).tobytes() for x in second]


@pytest.mark.parametrize("run", RUNS)
def test_no_host_work_and_one_compilation(run):
    """The compiled step calls nothing on the host and copies nothing to it, runs where transfers are refused, and another routing needs no other program.

    Nor does XLA's backend add by scatter, whose order is anyone's on a GPU."""
    step = compiled(run, SHARD)
    text = step.lower(CASE).compile().as_text()
    assert not re.search(r"callback|outfeed|infeed|send\(|recv\(|copy-start|S\(5\)", text)
    assert "callback" not in str(jax.make_jaxpr(step)(CASE))
    assert "scatter-add" not in str(jax.make_jaxpr(step)(CASE))
    step(CASE)
    others = [make_case(SHARD, seed) for seed in range(1, 9)]
    compilations = step._cache_size()
    with jax.transfer_guard("disallow"):
        for case in others:
            found = step(case)
    assert step._cache_size() == compilations
    assert np.isfinite(np.asarray(found["dweights"])).all()


@pytest.mark.parametrize("run", RUNS)
def test_with_route_and_a_grouped_product(run):
    """A whole layer of experts, with a capacity: results and the gradients of tokens, experts and logits as those of each token's experts one by one."""
    T, D, E, k = SHARD.T, 4, 6, SHARD.k
    x, w, logits = (jnp.asarray(np.random.default_rng(i).normal(size=size), jnp.float32) for i, size in enumerate(((T, D), (E, D, 5), (T, E))))

    def experts(x, w, logits):
        routing = jaxops.route(logits, k, capacity=5)
        rows = jaxops.grouped_matmul(permute(SHARD, run, x, routing), w, routing.group_offsets, precision="highest", backend="xla")
        return combine(SHARD, run, rows, routing)

    def one_by_one(x, w, logits):
        routing = jaxops.route(logits, k, capacity=5)
        chosen = jnp.sum(jax.nn.one_hot(routing.experts, E) * routing.weights[:, :, None], axis=1)
        return jnp.einsum("te,td,edn->tn", chosen, x, w, precision="highest")

    losses = [lambda *operands, f=f: jnp.sum(jnp.sin(f(*operands))) for f in (experts, one_by_one)]
    got, want = (jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(x, w, logits) for f in losses)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert_all_close(got[1], want[1], scale=5)
