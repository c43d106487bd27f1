"""Layers by a policy: XLA's options, and the line that a run prints. Their results: `test_decoder.py`."""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxops.offload import Policy
from models.distributed.mesh import make_mesh
from models.layers import OFFLOADED, apply_layers, options_for, remark
from tests.jaxprs import equations

ALWAYS = {
    "xla_gpu_enable_dynamic_slice_fusion": False,
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
    "xla_gpu_enable_triton_gemm": False,
}


def test_options_over_a_mesh():
    """Of a GPU; XLA for CPUs knows their names, too."""
    mesh = make_mesh(f"data={jax.device_count()}")
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        assert options_for(None) == options_for(Policy()) == ALWAYS
        copies = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"} if mesh.size > 1 else {}
        assert options_for(None, mesh) == ALWAYS | copies
        limit = {"xla_gpu_memory_limit_slop_factor": 400} if mesh.size > 1 else {}
        assert options_for(Policy(), mesh) == ALWAYS | copies | limit
        with mock.patch.dict(vars(mesh), is_multi_process=True):  # peer memory is that of one process
            assert options_for(None, mesh) == ALWAYS


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a machine without a GPU")
def test_a_cpu_has_one_memory():
    line = "offload: carry, attention to the host's memory, which is this machine's only one: nothing moves\n"
    assert [remark(policy) for policy in (None, Policy(), OFFLOADED)] == ["", "", line]
    assert options_for(None) == options_for(OFFLOADED) == {}


@pytest.mark.parametrize("policy", [OFFLOADED, Policy(offload=("carry",))], ids=["attention", "carry"])
def test_what_goes_to_the_host_needs_a_loop(policy):
    with pytest.raises(
        ValueError, match=f"unroll with a policy that offloads {', '.join(policy.offload)}: only a loop"
    ):
        apply_layers((), lambda *_: None, None, layers=(), each=(), policy=policy, unroll=True, training=False)


def test_unrolled_layers_read_vectors_behind_a_barrier():
    """The slices of weights, which only products read, are not copied."""

    class Scaled(nnx.Module):
        def __init__(self):
            self.w, self.scale = nnx.Param(jnp.ones((3, 4, 4))), nnx.Param(jnp.ones((3, 4)))

    def run(x):
        call = lambda layer, x, _: (x @ layer.w[...] * layer.scale[...][None], None)
        how = {"layers": (range(3),), "each": (None,), "policy": None, "unroll": True, "training": False}
        return apply_layers((Scaled(),), call, x, **how)[0]

    found = equations(jax.make_jaxpr(run)(jnp.ones((2, 4))).jaxpr)
    barriers = [equation for equation in found if equation.primitive.name == "optimization_barrier"]
    assert [[x.aval.shape for x in equation.outvars] for equation in barriers] == [[(4,)] * 3]
