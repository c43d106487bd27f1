"""The fused Hopper kernel, product and activation: compiled for an H200 without one, and run on one (marked gpu)."""

import dataclasses
import functools

import jax
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops import grouped_matmul
from jaxops.ops.grouped_glu import FusedTiles, Plan, Problem, make_plan
from jaxops.ops.grouped_glu.fwd_triton import fwd_triton
from tests.arrays import shape
from tests.gluon import SHARED_BYTES, check, compiled, launched

pytestmark = pytest.mark.versions

M, K, F, G = 1000, 528, 784, 3  # no whole tiles; the kernel does not depend on them
H200 = Device("NVIDIA H200", "gpu")
PROBLEM = Problem(G, M, K, F, "bfloat16")


TWO, ONE, BIAS = 2 * (shape(G, K, F),), (shape(G, K, 2 * F),), shape(G, 2 * F, dtype="float32")


@pytest.mark.parametrize(
    ("activation", "save", "weights", "bias"),
    # The shallow pipeline's: below, with gathered rows.
    [("silu", False, TWO, None), ("relu", True, TWO, None), ("swiglu_oai", True, ONE, BIAS)],
)
def test_kernel(activation, save, weights, bias, tmp_path):
    """A consumer multiplies its 64 rows by 128 columns of both weights at once, 64 of K in four instructions."""
    how = {"activation": activation, "save": save, "panel": 4, "stages": 4}
    kernel_of = functools.partial(fwd_triton, **how, cores=132)
    (kernel,) = compiled(kernel_of, shape(M, K), weights, bias, shape(G + 1, dtype="int32"))
    check(kernel, ["m64n256k16.f32.bf16.bf16"] * 8, 2, SHARED_BYTES, tmp_path)
    assert "cp.async.bulk.tensor.3d.global.shared" in kernel.ptx  # whole tiles leave by TMA,
    assert "st.global.v4" in kernel.ptx  # others 16 bytes a thread


@pytest.mark.parametrize(("stages", "bias"), [(3, None), (4, None), (3, BIAS)])
def test_gathering_kernel(stages, bias, tmp_path):
    """A's rows come from where row_indices say, 16 bytes a thread, by four warps instead of one. With biases a few
    registers go out and come back once a tile, not in the loop that multiplies."""
    how = {"activation": "silu", "save": True, "panel": 4, "stages": stages}
    weights = (shape(G, 512, F),) * 2
    arrays = (shape(300, 512), *weights, bias, shape(G + 1, dtype="int32"), shape(M, dtype="int32"))
    (kernel,) = compiled(lambda x, a, b, bias, *more: fwd_triton(x, (a, b), bias, *more, **how, cores=132), *arrays)
    check(kernel, ["m64n256k16.f32.bf16.bf16"] * 8, 2, SHARED_BYTES, tmp_path, spilled=64 if bias else 0)
    assert kernel.ptx.count("cp.async.cg.shared.global") == 128 * 64 * 2 // (16 * 128)


def test_a_users_call():
    """One kernel for the forward, and the products of the backward pass."""

    def gradients(x, a, b, dh, offsets):
        h, vjp = jax.vjp(lambda x, a, b: jaxops.grouped_glu(x, a, b, offsets, backend="triton"), x, a, b)
        return h, *vjp(dh)

    names = launched(gradients, shape(M, K), shape(G, K, F), shape(G, K, F), shape(M, F), shape(G + 1, dtype="int32"))
    assert names == ["grouped_glu_fwd", "grouped_matmul_dgrad", "grouped_matmul_wgrad", "grouped_matmul_wgrad"]


def test_plan():
    plan = make_plan(PROBLEM, H200, backend="triton")
    assert (plan.backend, plan.fused, plan.products.backend) == ("triton", FusedTiles(8, stages=4), "triton")
    long = dataclasses.replace(PROBLEM, K=4104)
    assert make_plan(long, H200, backend="triton").fused == FusedTiles(8, stages=3), "long sums have three stages"
    assert plan.bwd == make_plan(PROBLEM, H200, backend="pallas").bwd
    assert make_plan(PROBLEM, H200, plan=Plan("triton", fused=FusedTiles(2))).fused == FusedTiles(2)
    assert make_plan(PROBLEM, H200).backend == "triton"
    assert make_plan(PROBLEM, H200, backend="pallas").backend == "pallas"
    assert make_plan(dataclasses.replace(PROBLEM, joined=True), H200).backend == "triton"
    for other in ({"joined": True, "F": 780}, {"recast": True}, {"dtype": "float32"}, {"M": 31 * G}):
        assert make_plan(dataclasses.replace(PROBLEM, **other), H200).backend == "pallas"
    with pytest.raises(ValueError, match=r"FusedTiles\.panel=0"):
        FusedTiles(0)
    with pytest.raises(ValueError, match=r"FusedTiles\.stages=5 must be one of 3, 4"):
        FusedTiles(stages=5)


@pytest.mark.parametrize(
    ("problem", "device", "says"),
    [
        (PROBLEM, Device("NVIDIA L4", "gpu"), "needs a Hopper GPU.*NVIDIA L4"),
        (Problem(G, M, K, F, "float32"), H200, "this is float32"),
        (Problem(G, M, 500, F, "bfloat16"), H200, "K=500"),
        (Problem(G, M, K, 700, "bfloat16"), H200, "N=700"),
        (Problem(G, M, K, 700, "bfloat16", joined=True), H200, "halves of a row.* F is 700, no multiple of 8"),
    ],
    ids=["card", "float32", "K", "F", "joined"],
)
def test_what_it_cannot(problem, device, says):
    for plan in (Plan("triton"), Plan("triton", fused=FusedTiles(), products=grouped_matmul.Plan("xla"))):
        with pytest.raises(NotImplementedError, match=says):
            make_plan(problem, device, plan=plan)


def test_h_of_another_dtype():
    def call(x, a, b, offsets):
        return jaxops.grouped_glu(x, a, b, offsets, compute_dtype="bfloat16", backend="triton")

    with pytest.raises(NotImplementedError, match="h in the dtype of its products, bfloat16: cast x"):
        compiled(call, shape(M, K, dtype="float32"), shape(G, K, F), shape(G, K, F), shape(G + 1, dtype="int32"))
