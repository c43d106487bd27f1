"""On a GPU: the same bits for every policy, no kept value recomputed, and work behind the copies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxops
from jaxops.offload import OffloadError, Policy, compiler_options, named, propose, report, scan, streamed

pytestmark = [pytest.mark.versions, pytest.mark.gpu]
LAYERS, T, D, EXPERTS, HIDDEN, HEADS = 4, 4096, 1024, 8, 512, 8
NAMES = ("carry", "attention", "middle", "router", "route", "moe_mlp", "adaln", "permute", "combine")


def weights():
    shapes = {
        "qkv": (D, 3 * D),
        "out": (D, D),
        "router": (D, EXPERTS),
        "gate": (EXPERTS, D, HIDDEN),
        "up": (EXPERTS, D, HIDDEN),
        "down": (EXPERTS, HIDDEN, D),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, (LAYERS, *shape)) * shape[-2] ** -0.5
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }


def layer(x, w):
    """Attention by cuDNN, AdaLN by Pallas, a mixture of experts by Hopper's kernels."""
    half = lambda name: w[name].astype(jnp.bfloat16)
    q, k, v = jnp.unstack((x @ half("qkv")).reshape(2, -1, 3, HEADS, D // HEADS), axis=2)
    attend = named(functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"), "attention")
    x = checkpoint_name(x + attend(q, k, v).reshape(x.shape) @ half("out"), "middle")
    zeros = jnp.zeros((1, D), jnp.bfloat16)
    y = jaxops.adaln(x, zeros, zeros, jnp.array([0, T], jnp.int32))
    routing = jaxops.route(checkpoint_name(y.astype(jnp.float32) @ w["router"], "router"), 2)
    return x + jaxops.moe_mlp(y, half("gate"), half("up"), half("down"), routing), None


def step(weights, x, *, policy):
    run = jax.lax.scan if policy is None else functools.partial(scan, policy=policy)
    return jax.value_and_grad(lambda w: jnp.sum(run(layer, x, w)[0].astype(jnp.float32) ** 2))(weights)


@functools.cache
def compiled(policy):
    x = jax.random.normal(jax.random.key(1), (T, D), jnp.bfloat16)
    # Otherwise cuDNN's backward sums by atomics: two runs of one program may differ.
    options = {**compiler_options(), "xla_gpu_exclude_nondeterministic_ops": True}
    program = jax.jit(functools.partial(step, policy=policy), compiler_options=options).lower(weights(), x).compile()
    return program, jax.device_get(program(weights(), x))


def kernels(program):
    """Calls of kernels and of cuDNN in the program, and products, by cuBLAS or in fusions."""
    text = program.as_text()
    calls = sum(
        text.count(f'custom_call_target="{name}')
        for name in ("__gpu$xla.gpu.triton", "triton_kernel_call", "__cudnn", "__cublas")
    )
    return calls + text.count(" dot(")


def test_the_same_bits():
    kept, offloaded = compiled(Policy(keep=NAMES)), compiled(Policy(offload=NAMES))
    for ours, wanted in zip(jax.tree.leaves(offloaded[1]), jax.tree.leaves(kept[1]), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(kept[1]))


def test_what_is_kept_runs_once():
    plain, kept, offloaded, recomputed = (
        kernels(compiled(policy)[0]) for policy in (None, Policy(keep=NAMES), Policy(offload=NAMES), Policy())
    )
    assert plain == kept == offloaded < recomputed


def test_report():
    found = report(compiled(Policy(offload=NAMES))[0], verify=True)
    assert found.host_bytes >= LAYERS * T * D * 2 * 5, (
        "the layers' inputs, queries, keys, values and what attention gives"
    )
    assert all(copy.behind for copy in found.copies if copy.in_loop)
    assert (
        sum(copy.in_loop for copy in found.copies if copy.to == "host")
        == sum(copy.in_loop for copy in found.copies if copy.to == "device")
        > 5
    )
    assert found.device_bytes < report(compiled(Policy(keep=NAMES))[0]).device_bytes
    with pytest.raises(OffloadError, match="nothing is offloaded"):
        report(compiled(Policy(keep=NAMES))[0], verify=True)


def test_copies_beside_what_is_kept():
    """Kept values are written to stacks in the same loop, at the same counter."""
    found = report(
        compiled(Policy(keep=("middle", "router", "route", "moe_mlp"), offload=("carry", "attention")))[0], verify=True
    )
    leaving = [copy for copy in found.copies if copy.to == "host"]
    assert len(leaving) > 5
    assert all(copy.in_loop and copy.behind > 10 for copy in leaving)


def test_a_single_large_copy():
    """Behind a layer's 35 products.

    Without the barrier behind 19, beside gradients that are written to stacks and move as many bytes.
    """
    found = report(compiled(Policy(offload=("carry",)))[0], verify=True)
    assert [copy.to for copy in found.copies if copy.in_loop] == ["host", "device"]
    assert found.copies[-1].products > 25


def test_propose():
    w, x = weights(), jax.random.normal(jax.random.key(1), (T, D), jnp.bfloat16)
    everything = report(compiled(Policy(keep=NAMES))[0]).device_bytes
    found = propose(step, w, x, device_budget=everything - (1 << 24))
    assert set(found.residuals) > {"carry", "attention", "moe_mlp.gate"}
    assert found.device_bytes <= everything
    assert found.recompute_us > found.residuals["attention"].saves_us > 0


def test_streamed_optimizer():
    """As optax's step, with the state on the host."""
    w = weights()
    tx = optax.adamw(2.0**-10, b1=0.5, b2=0.75, weight_decay=0.0)
    optimizer = streamed(tx, pieces=LAYERS)
    state, grads = optimizer.init(w), jax.tree.map(jnp.sin, w)
    large = [leaf for leaf in jax.tree.leaves(state) if leaf.nbytes >= 1 << 20]
    assert large
    assert {leaf.sharding.memory_kind for leaf in large} == {"pinned_host"}

    def plain(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    wanted = jax.jit(plain)(w, jax.jit(tx.init)(w), grads)
    ours = jax.jit(optimizer.apply, donate_argnums=(0, 1))(w, state, grads)
    for a, b in zip(jax.tree.leaves(jax.device_get(ours)), jax.tree.leaves(jax.device_get(wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
