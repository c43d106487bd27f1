"""MoE in FP8, whose numbers are the op's: options, several devices, transformations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.nn import MoE, Router, moe
from tests.arrays import put
from tests.parallel.cases import mesh_of

# More columns than a block of 128 has; expert 3 has no rows.
T, E, D, F, K, EMPTY = 36, 6, 136, 150, 2, 3


def make(recipe: str | None, **options) -> MoE:
    rngs = nnx.Rngs(0)
    router = Router(D, E, K, score="sigmoid", use_bias=True, rngs=rngs)
    assert router.selection_bias is not None
    router.selection_bias[...] = router.selection_bias[...].at[EMPTY].set(-9.0)
    if recipe is None:
        options |= {"precision": "highest"}
    return MoE(E, D, F, router=router, recipe=recipe, **options, rngs=rngs)


def normal(seed: int, *shape: int) -> jax.Array:
    return put(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def compiled(layer):
    """Of a layer that several tests have, one program."""

    def loss(params, x, dout):
        y = layer(params, x)
        return jnp.sum(y * dout), y

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def result_and_gradients(layer, params, x: jax.Array, dout: jax.Array):
    """(y, gradients of the parameters and of x); layer is a function of (params, x)."""
    grads, y = compiled(layer)(params, x, dout)
    return y, *grads


def of(module: MoE):
    """(the layer as a function of its parameters and tokens, the parameters)"""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    return lambda params, x: nnx.merge(graphdef, params, rest)(x)[0], params


@functools.cache
def layer_of(recipe: str | None, **options):
    """The same function each time, so that `compiled` has it."""
    return of(make(recipe, **options))


def errors(got, want) -> dict[str, float]:
    """RMS error over RMS of each array, by its path."""
    found = {}
    for (path, ours), wanted in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        ours, wanted = (np.asarray(x, np.float64) for x in (ours, wanted))
        assert ours.shape == wanted.shape
        found[jax.tree_util.keystr(path)] = float(np.sqrt(np.mean((ours - wanted) ** 2) / np.mean(wanted**2)))
    return found


def test_options_reach_the_op(monkeypatch):
    seen, call = {}, moe.moe_mlp
    monkeypatch.setattr(moe, "moe_mlp", lambda *given, **how: seen.update(how) or call(*given, **how))
    options = {"recipe": "blockwise", "pow2_scales": True, "backend": "pallas"}
    jax.eval_shape(lambda x: make(**options)(x)[0], normal(1, T, D))
    assert {name: seen[name] for name in options} == options


@pytest.mark.parametrize("gather_tokens", [False, True])
def test_experts_over_devices(gather_tokens):
    """Three devices with two experts each give what one with all gives: no block of 128 has rows of two experts."""
    if jax.device_count() < 3:
        pytest.skip("needs several devices")
    mesh = mesh_of(3, names=("expert",))
    (alone, params), (split, _) = (
        layer_of("blockwise", **how) for how in ({}, {"expert_axis": "expert", "gather_tokens": gather_tokens})
    )
    rows = P("expert") if gather_tokens else P()
    specs = jax.tree.map_with_path(
        lambda path, _: P("expert") if path[0].key in ("gate", "up", "down") else P(), params
    )
    over = jax.shard_map(split, mesh=mesh, in_specs=(specs, rows), out_specs=rows)
    x, dout = normal(1, T, D), normal(2, T, D)
    for name, error in errors(*(result_and_gradients(f, params, x, dout) for f in (over, alone))).items():
        assert error < 2e-3, (name, error)


def test_transformations():
    """Under vmap, in a scan, with what a policy keeps, all at once: as each by itself."""
    x, dout = normal(1, 2, 2, T, D), normal(2, 2, 2, T, D)
    layer, params = layer_of("blockwise")
    by_one = [result_and_gradients(layer, params, x[at], dout[at]) for at in np.ndindex(2, 2)]
    want = jax.tree.map(lambda *a: jnp.stack(a), *by_one)
    want = (want[0].reshape(x.shape), jax.tree.map(lambda a: jnp.sum(a, axis=0), want[1]), want[2].reshape(x.shape))
    policy: Any = jaxops.offload.Policy(keep=("moe_mlp", "route", "router"))
    kept = jax.checkpoint(jax.vmap(layer, in_axes=(None, 0)), policy=policy)
    over = lambda params, x: lax.map(lambda x: kept(params, x), x)
    for name, error in errors(result_and_gradients(over, params, x, dout), want).items():
        assert error < 2e-3, (name, error)
