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
from tests.compare import assert_close
from tests.hopper import H200
from tests.ops.route.cases import CHOSEN, DEEPSEEK, RUNS, SMOOTH, apply, apply_reference, compiled, make_case

VARIANT = DEEPSEEK
CASE = make_case(VARIANT)


def loss_of(routing) -> jax.Array:
    return jnp.sum(jnp.sin(3 * routing.weights)) + routing.aux_loss + 0.1 * routing.z_loss


def loss(run, logits, bias):
    return loss_of(apply(VARIANT, run, logits, bias))


def reference_loss(logits, bias):
    return loss_of(apply_reference(VARIANT, logits, bias))


@functools.cache
def gradient(run):
    return jax.jit(jax.value_and_grad(functools.partial(loss, run), argnums=(0, 1)))


def assert_same(got, want) -> None:
    for name in CHOSEN:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    for name in SMOOTH:
        assert_close(getattr(got, name), getattr(want, name), "float32", name)


@pytest.mark.parametrize("run", RUNS)
def test_vmap(run):
    """Each element is routed by itself: its rows, its capacity, its losses."""
    cases = [make_case(VARIANT, seed) for seed in range(4)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)
    got, gradients = jax.jit(jax.vmap(compiled(run, VARIANT)))(stacked)
    for i, case in enumerate(cases):
        want, wanted_gradient = compiled(run, VARIANT)(case)
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], got), want)
        assert_close(gradients[i], wanted_gradient, "float32", "gradient", scale=2)


@pytest.mark.parametrize("run", RUNS)
def test_remat_and_scan(run):
    """A scan over layers with rematerialised bodies: forward and backward as without. The experts' numbers reach the result."""

    def stack(route, logits):
        def body(logits, scale):
            routing = route(logits * scale, CASE["bias"])
            mixed = jnp.zeros_like(logits).at[jnp.arange(VARIANT.T)[:, None], routing.experts].add(routing.weights)
            return jnp.tanh(logits + mixed), loss_of(routing)

        logits, losses = jax.lax.scan(jax.checkpoint(body), logits, jnp.array([1.0, 0.7]))
        return jnp.sum(logits) + jnp.sum(losses)

    got = jax.jit(jax.value_and_grad(functools.partial(stack, functools.partial(apply, VARIANT, run))))(CASE["logits"])
    want = jax.jit(jax.value_and_grad(functools.partial(stack, functools.partial(apply_reference, VARIANT))))(CASE["logits"])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert_close(got[1], want[1], "float32", "gradient", scale=5)  # two layers, and a tanh over them


@pytest.mark.parametrize("run", RUNS)
def test_bias_gets_no_gradient(run):
    assert not np.asarray(gradient(run)(CASE["logits"], CASE["bias"])[1][1]).any()


@pytest.mark.parametrize("run", RUNS)
def test_second_order(run):
    def directional(loss, logits):
        return jnp.sum(jax.grad(loss)(logits, CASE["bias"]) ** 2)

    got = jax.jit(jax.grad(functools.partial(directional, functools.partial(loss, run))))(CASE["logits"])
    assert_close(got, jax.jit(jax.grad(functools.partial(directional, reference_loss)))(CASE["logits"]), "float32", scale=5)


@pytest.mark.parametrize("run", RUNS)
def test_forward_mode_is_refused(run):
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda logits: jax.jvp(lambda logits: loss(run, logits, CASE["bias"]), (logits,), (logits,))).lower(CASE["logits"])


@pytest.mark.parametrize("run", ["xla", "interpret"])
def test_shard_map_over_tokens(run):
    """Each device routes its own tokens; a replicated bias serves all. What balances the bias is the sum of the loads."""
    if jax.device_count() < 4:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    logits = jnp.concatenate([make_case(VARIANT, seed)["logits"] for seed in range(4)])

    def shard(logits, bias):
        routing = apply(VARIANT, run, logits, bias)
        return loss_of(routing)[None], jax.lax.psum(routing.load, "d")

    # Pallas' interpreter cannot follow varying axes; the kernels' own types are checked by lowering, below.
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P("d"), P()), out_specs=(P("d"), P()), check_vma=run == "xla")

    def total(logits):
        losses, load = sharded(logits, CASE["bias"])
        return jnp.sum(losses), load

    (value, load), got = jax.jit(jax.value_and_grad(total, has_aux=True))(logits)
    reference = jax.jit(jax.value_and_grad(reference_loss))
    wants = [reference(part, CASE["bias"]) for part in np.split(np.asarray(logits), 4)]
    np.testing.assert_allclose(value, sum(want for want, _ in wants), rtol=1e-5)
    assert_close(got, jnp.concatenate([want for _, want in wants]), "float32", scale=2)
    assert int(load.sum()) == 4 * VARIANT.T * VARIANT.k


def test_shard_map_checks_the_kernels_varying_axes():
    """check_vma=True traces all kernels with a replicated bias."""
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)

    def shard(logits, bias):
        def f(logits):
            routing = jaxops.route(logits, 2, bias=bias, capacity=9)
            return loss_of(routing), routing

        return jax.grad(f, has_aux=True)(logits)[0]

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(sharded)(jax.ShapeDtypeStruct((64, 8), "float32"), jax.ShapeDtypeStruct((8,), "float32")))
    assert all(f"route_{name}" in text for name in ("choose", "count", "place", "bwd"))


@pytest.mark.parametrize("run", RUNS)
def test_two_runs_give_the_same_bits(run):
    first, second = (jax.tree.leaves(compiled(run, VARIANT)(CASE)) for _ in range(2))
    assert [np.asarray(x).tobytes() for x in first] == [np.asarray(x).tobytes() for x in second]


@pytest.mark.parametrize("run", RUNS)
def test_no_host_work_and_one_compilation(run):
    """The compiled step calls nothing on the host and copies nothing to it, runs where transfers are refused, and other logits need no other program."""
    step, bias = gradient(run), CASE["bias"]
    assert not re.search(r"callback|outfeed|infeed|send\(|recv\(|copy-start|S\(5\)", step.lower(CASE["logits"], bias).compile().as_text())
    assert "callback" not in str(jax.make_jaxpr(step)(CASE["logits"], bias))
    step(CASE["logits"], bias)
    others = [make_case(VARIANT, seed)["logits"] for seed in range(1, 20)]
    compilations = step._cache_size()
    with jax.transfer_guard("disallow"):
        for logits in others:
            value, _ = step(logits, bias)
    assert step._cache_size() == compilations
    assert np.isfinite(float(value))


def test_a_routing_is_a_pytree():
    """Through jit, with its fields by name."""
    routing = jax.jit(lambda logits: apply(VARIANT, "xla", logits, CASE["bias"]))(CASE["logits"])
    assert isinstance(routing, jaxops.Routing)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, routing)
    np.testing.assert_array_equal(doubled.load, 2 * np.asarray(routing.load))
    assert [path[0].name for path, _ in jax.tree.leaves_with_path(routing)] == list(vars(routing))


def test_feeds_a_grouped_product():
    """Experts after the router, and the sum with the router's weights: the same as each token's experts one by one."""
    x, w = (np.random.default_rng(seed).normal(size=size).astype(np.float32) for seed, size in enumerate(((VARIANT.T, 4), (VARIANT.E, 4, 5))))

    @jax.jit
    def layer(x, w):
        routing = apply(VARIANT, "xla", CASE["logits"], CASE["bias"])
        rows = jaxops.grouped_matmul(x[routing.row_indices], w, routing.group_offsets)
        gathered = jnp.take(rows, routing.row_positions, axis=0, mode="fill", fill_value=0)
        return jnp.einsum("tkd,tk->td", gathered, routing.weights), routing

    got, routing = layer(x, w)
    weights, experts = np.asarray(routing.weights), np.asarray(routing.experts)
    want = np.stack([sum(weights[t, j] * x[t] @ w[experts[t, j]] for j in range(VARIANT.k)) for t in range(VARIANT.T)])
    assert_close(got, want, "float32")
