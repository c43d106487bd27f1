"""Layers by a policy: what a run says of it, and that a diffusion transformer's give the same (`test_decoder.py` has the decoder's)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops.offload import Policy
from models.dit import DiT, DiTConfig, loss_fn
from models.images import Batch
from models.layers import OFFLOADED, options_for, remark


@pytest.mark.parametrize("policy", [None, Policy(), Policy(keep=("route",))], ids=str)
def test_nothing_moves(policy):
    assert remark(policy) == ""
    assert options_for(policy) == {}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a machine without a GPU")
def test_a_cpu_has_one_memory():
    assert remark(OFFLOADED) == "offload: carry, attention to the host's memory, which is this machine's only one: nothing moves\n"
    assert options_for(OFFLOADED) == {}


def test_the_diffusion_transformer_by_any_policy():
    config = DiTConfig(2, 16, 2, token=4, classes=3, longest=9, backend="xla")
    grids = jnp.array([[2, 3], [3, 3], [0, 0]], jnp.int32)
    batch = Batch(jax.random.normal(jax.random.key(1), (18, 4)), jnp.array([0, 6, 15, 15], jnp.int32), grids, jnp.array([0, 2, 1], jnp.int32))
    _, params, rest = nnx.split(DiT(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    params = jax.tree.map(lambda p: p + 0.1 * jnp.cos(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape), params)  # gates begin at zero

    def gradients(policy):
        made = nnx.split(nnx.eval_shape(lambda: DiT(dataclasses.replace(config, policy=policy), rngs=nnx.Rngs(0))))[0]
        return jax.jit(jax.value_and_grad(lambda params: loss_fn(nnx.merge(made, params, rest), batch, jax.random.key(2))))(params)

    for ours, wanted in zip(jax.tree.leaves(gradients(OFFLOADED)), jax.tree.leaves(gradients(None)), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)
