"""MoE in FP8, whose numbers are the op's: options, and experts over several devices."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxops.nn import MoE, Router, moe
from tests.arrays import normal
from tests.parallel.cases import mesh_of

# More columns than a block of 128 has; expert 3 has no rows.
T, E, D, F, K, EMPTY = 36, 6, 136, 150, 2, 3


def make(**options) -> MoE:
    rngs = nnx.Rngs(0)
    router = Router(D, E, K, score="sigmoid", use_bias=True, rngs=rngs)
    assert router.selection_bias is not None
    router.selection_bias[...] = router.selection_bias[...].at[EMPTY].set(-9.0)
    return MoE(E, D, F, router=router, recipe="blockwise", **options, rngs=rngs)


def test_options_reach_the_op(monkeypatch):
    seen, call = {}, moe.moe_mlp
    monkeypatch.setattr(moe, "moe_mlp", lambda *given, **how: seen.update(how) or call(*given, **how))
    options = {"pow2_scales": True, "backend": "pallas"}
    jax.eval_shape(lambda x: make(**options)(x)[0], normal(1, T, D))
    assert {name: seen[name] for name in ("recipe", *options)} == {"recipe": "blockwise"} | options


@functools.cache
def results(expert_axis: str | None, **exchange: bool) -> tuple:
    """y and the gradients of parameters and tokens."""
    graphdef, params, rest = nnx.split(make(expert_axis=expert_axis, **exchange), nnx.Param, ...)

    def layer(params, x):
        return nnx.merge(graphdef, params, rest)(x)[0]

    if expert_axis:
        rows = P(expert_axis) if exchange else P()
        experts = lambda path, _: P(expert_axis) if path[0].key in ("gate", "up", "down") else P()
        specs = jax.tree.map_with_path(experts, params)
        layer = jax.shard_map(layer, mesh=mesh_of(3, names=(expert_axis,)), in_specs=(specs, rows), out_specs=rows)

    @jax.jit
    def step(params, x, dy):
        y, vjp = jax.vjp(layer, params, x)
        return y, *vjp(dy)

    return step(params, normal(1, T, D), normal(2, T, D))


@pytest.mark.parametrize("exchange", [(), ("gather_tokens",), ("send_tokens",)])
def test_experts_over_devices(exchange):
    """Three devices with two experts each give what one with all gives: no block of 128 has rows of two experts."""
    if jax.device_count() < 3:
        pytest.skip("needs several devices")
    got, want = results("expert", **dict.fromkeys(exchange, True)), results(None)
    for (path, ours), wanted in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = np.asarray(ours, np.float64) - np.asarray(wanted, np.float64)
        assert np.sqrt(np.mean(error**2) / np.mean(wanted**2)) < 2e-3, jax.tree_util.keystr(path)
