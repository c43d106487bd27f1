"""Layers by a policy: the line that a run prints, and equal results of a diffusion transformer.

`test_decoder.py` has the decoder's.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops.offload import Policy
from models.data.images import Batch
from models.distributed.mesh import make_mesh
from models.dit.model import DiT, DiTConfig, loss_fn
from models.layers import OFFLOADED, options_for, remark
from tests.arrays import drawn_like

LOOPS = {"xla_gpu_enable_dynamic_slice_fusion": False, "xla_gpu_enable_dus_accumulator_zero_init_elimination": True}


@pytest.mark.parametrize("policy", [None, Policy(), Policy(keep=("route",))], ids=str)
def test_nothing_moves(policy):
    assert remark(policy) == ""
    assert options_for(policy) == ({} if jax.default_backend() == "cpu" else LOOPS)


def test_options_over_a_mesh():
    """Of a GPU; XLA for CPUs knows their names, too."""
    mesh = make_mesh(f"data={jax.device_count()}")
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        assert options_for(None) == LOOPS
        copies = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"} if mesh.size > 1 else {}
        products = {"xla_gpu_enable_triton_gemm": False} if mesh.size > 1 else {}
        assert options_for(None, mesh) == LOOPS | copies
        assert options_for(None, mesh, routers=True) == LOOPS | copies | products
        limit = {"xla_gpu_memory_limit_slop_factor": 400} if mesh.size > 1 else {}
        assert options_for(Policy(), mesh) == LOOPS | copies | limit
        with mock.patch.dict(vars(mesh), is_multi_process=True):  # peer memory is that of one process
            assert options_for(None, mesh) == LOOPS
    if jax.default_backend() == "cpu":
        assert options_for(None, mesh) == {}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a machine without a GPU")
def test_a_cpu_has_one_memory():
    assert (
        remark(OFFLOADED)
        == "offload: carry, attention to the host's memory, which is this machine's only one: nothing moves\n"
    )
    assert options_for(OFFLOADED) == {}


CONFIG = DiTConfig(2, 16, 2, token=4, classes=3, longest=9, backend="xla")


@functools.cache
def parameters():
    """In a new model gates are zero."""
    _, params, rest = nnx.split(nnx.eval_shape(lambda: DiT(CONFIG, rngs=nnx.Rngs(0))), nnx.Param, ...)
    return drawn_like(params, np.random.default_rng(0), 0.25), rest


@functools.cache
def gradients_by(**how):
    """(whether there is a loop over the layers, loss, gradients) of a DiT of two layers with nonzero gates."""
    grids = jnp.array([[2, 3], [3, 3], [0, 0]], jnp.int32)
    batch = Batch(
        jax.random.normal(jax.random.key(1), (18, 4)),
        jnp.array([0, 6, 15, 15], jnp.int32),
        grids,
        jnp.array([0, 2, 1], jnp.int32),
    )
    params, rest = parameters()
    made = nnx.split(nnx.eval_shape(lambda: DiT(dataclasses.replace(CONFIG, **how), rngs=nnx.Rngs(0))))[0]
    traced = jax.jit(
        jax.value_and_grad(lambda params: loss_fn(nnx.merge(made, params, rest), batch, jax.random.key(2)))
    ).trace(params)
    return "length=2" in str(traced.jaxpr), jax.tree.leaves(traced.lower().compile()(params))


@pytest.mark.parametrize(
    ("policy", "unroll", "loops"),
    [(OFFLOADED, False, True), (Policy(), True, False)],
    ids=["offloaded", "recomputed unrolled"],
)
def test_the_diffusion_transformer_by_any_policy(policy, unroll, loops):
    looped, got = gradients_by(policy=policy, unroll=unroll)
    assert looped == loops
    for ours, wanted in zip(got, gradients_by()[1], strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)


def test_what_goes_to_the_host_needs_a_loop():
    with pytest.raises(ValueError, match="unroll with a policy that offloads carry, attention"):
        gradients_by(policy=OFFLOADED, unroll=True)
