"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops.quantize import Plan, Problem, Tiles, make_plan

M, K = 6, 10
OFFSETS = np.array([0, 2, 6], np.int32)


def shape(*sizes: int, dtype="float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


ERRORS = {
    "x-rank": ({"x": shape(K)}, ValueError, r"x has shape \(10,\).*\[M, K\] or a stack \[G, M, K\].*reshape"),
    "x-int": ({"x": shape(M, K, dtype="int8")}, TypeError, r"x is int8.*bfloat16, float16, float32.*x\.astype"),
    "x-float8": ({"x": shape(M, K, dtype="float8_e5m2")}, TypeError, r"x is float8_e5m2"),
    "x-list": ({"x": [[1.0]]}, TypeError, r"x is a list.*\[M, K\]"),
    "scaling": (
        {"scaling": "blockwise"},
        ValueError,
        r"scaling='blockwise'.*'tensorwise', 'rowwise', 'block_1x128', 'block_128x128'",
    ),
    "layouts": ({"layouts": "column"}, ValueError, r"layouts='column'.*'row', 'col', 'both'"),
    "dtype": ({"dtype": jnp.bfloat16}, TypeError, r"dtype=bfloat16.*float8_e4m3fn, float8_e5m2"),
    "dtype-fnuz": ({"dtype": jnp.float8_e4m3fnuz}, TypeError, r"dtype=float8_e4m3fnuz"),
    "backend": ({"backend": "triton"}, ValueError, r"backend='triton'.*'auto', 'pallas' or 'xla'"),
    "plan": (
        {"backend": "xla", "plan": Plan("pallas")},
        ValueError,
        r"backend='xla' contradicts plan\.backend='pallas'",
    ),
    "offsets-rank": ({"group_offsets": OFFSETS[None]}, ValueError, r"group_offsets has shape \(1, 3\)"),
    "offsets-int64": (
        {"group_offsets": OFFSETS.astype(np.int64)},
        TypeError,
        r"group_offsets is int64.*astype\(jnp\.int32\)",
    ),
    "offsets-stack": (
        {"x": shape(2, M, K), "group_offsets": OFFSETS},
        ValueError,
        r"x has shape \(2, 6, 10\), a stack.*one matrix \[M, K\]",
    ),
    "offsets-128": (
        {"scaling": "block_128x128", "group_offsets": OFFSETS},
        NotImplementedError,
        r"'block_128x128' does not take group_offsets.*'block_1x128'",
    ),
    "amax": ({"amax": np.float32(1)}, ValueError, r"amax is one number.*scaling='block_1x128'.*'tensorwise'"),
    "amax-dtype": (
        {"scaling": "tensorwise", "amax": np.float16(1)},
        TypeError,
        r"amax is float16.*amax\.astype\(jnp\.float32\)",
    ),
    "amax-python": ({"scaling": "tensorwise", "amax": 1.0}, TypeError, r"amax is a float.*float32 scalar"),
    "amax-shape": (
        {"scaling": "tensorwise", "amax": np.ones(2, np.float32)},
        ValueError,
        r"amax has shape \(2,\).*must be \(\)",
    ),
}


@pytest.mark.parametrize(("change", "error", "match"), ERRORS.values(), ids=ERRORS)
def test_error(change, error, match):
    given = {"x": shape(M, K)} | change
    x = given.pop("x")
    with pytest.raises(error, match=match):
        jaxops.quantize(jnp.zeros(x.shape, x.dtype) if hasattr(x, "shape") else x, **given)
    if hasattr(x, "shape"):  # eval_shape runs nothing: the error needs no device and no value
        with pytest.raises(error, match=match):
            jax.eval_shape(lambda x: jaxops.quantize(x, **given), x)


def test_dequantize_of_something_else():
    with pytest.raises(TypeError, match=r"q is a.*jaxops\.quantize"):
        jaxops.dequantize(jnp.ones((2, 2)))


def test_forward_mode():
    with pytest.raises(NotImplementedError, match="has no gradient"):
        jax.jvp(lambda x: jaxops.quantize(x).scales, (jnp.ones((2, 2)),), (jnp.ones((2, 2)),))


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-16GB"])
def test_a_gpu_without_fp8(kind):
    problem = Problem(M, K, "bfloat16")
    assert make_plan(problem, Device(kind, "gpu")).backend == "xla"
    with pytest.raises(NotImplementedError, match=rf"8\.9 or newer.*{kind}.*backend='xla'"):
        make_plan(problem, Device(kind, "gpu"), backend="pallas")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rows": 12}, r"Tiles\.rows=12.*power of two"),
        ({"cols": 0}, r"Tiles\.cols=0.*power of two"),
        ({"patch": 3}, r"Tiles\.patch=3.*power of two"),
        ({"near": -1}, r"Tiles\.near=-1.*power of two"),
        ({"panel": 5}, r"Tiles\.panel=5.*power of two"),
        ({"warps": 64}, r"Tiles\.warps=64.*at most 32"),
        ({"patch": 16, "near": 2}, r"Tiles\.patch=16 times Tiles\.near=2.*at most Tiles\.rows=16"),
        ({"programs": 0}, r"Tiles\.programs=0 must be at least 1"),
    ],
    ids=str,
)
def test_tiles_that_no_kernel_can_have(change, match):
    with pytest.raises(ValueError, match=match):
        Tiles(**{"rows": 16, "cols": 128, **change})


@pytest.mark.parametrize(
    ("tile", "options", "match"),
    [
        (Tiles(64, 128), {"layouts": "both"}, r"rows must be 128 .*layouts='both'"),
        (Tiles(128, 256), {"layouts": "col"}, r"cols must be at most 128"),
        (Tiles(16, 64), {}, r"cols must be a multiple of 128"),
        (Tiles(128, 64), {"scaling": "block_128x128"}, r"cols must be a multiple of 128"),
    ],
    ids=str,
)
def test_tiles_that_cut_what_shares_a_scale(tile, options, match):
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda x: jaxops.quantize(x, plan=Plan("pallas", tile), **options), shape(M, K))
