"""quantize_lhs=False: rows in half precision times FP8 weights, forward and gradient, by every backend that has it."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxops
from tests.compare import assert_close
from tests.ops.fp8_matmul.cases import RUNS, Case, make_case, quantized_w, y_and_dx

BY = RUNS[:3]  # Hopper's kernel multiplies FP8 by FP8


@jax.jit
def by_layout(w8: jaxops.Quantized) -> tuple[jax.Array, jax.Array]:
    """float32, of the column layout and of the row layout."""
    return jaxops.dequantize(w8.T, "float32").mT, jaxops.dequantize(w8, "float32")


def reference(case: Case, w8: jaxops.Quantized) -> tuple[np.ndarray, np.ndarray]:
    """(y, dx) in float64, of each layout's own values."""
    half = np.float16 if case.x.dtype == jnp.float16 else ml_dtypes.bfloat16
    x, dy = (np.asarray(v).astype(half).astype(np.float64) for v in (case.x, case.dy))
    for_y, for_dx = (np.asarray(w, np.float64) for w in by_layout(w8))
    if case.offsets is None:
        for_y, for_dx = for_y[None], for_dx[None]
    bounds = [0, len(x)] if case.offsets is None else np.asarray(case.offsets).tolist()
    y, dx = np.zeros(dy.shape), np.zeros(x.shape)
    for g, (lo, hi) in enumerate(itertools.pairwise(bounds)):
        y[lo:hi], dx[lo:hi] = x[lo:hi] @ for_y[g], dy[lo:hi] @ for_dx[g].T
    return y, dx


@pytest.mark.parametrize("run", BY)
@pytest.mark.parametrize(
    ("recipe", "dtype", "sizes"),
    [
        ("blockwise", "bfloat16", None),
        ("tensorwise", "float16", None),
        ("rowwise", "float32", None),
        ("blockwise", "float32", (9, 0, 7, 2)),
        ("rowwise", "bfloat16", (0, 18)),
    ],
    ids=lambda x: "groups" if isinstance(x, tuple) else str(x),
)
def test_values(run, recipe, dtype, sizes):
    """K and N no multiples of 128; rows outside the groups are NaN, and zeros in the results."""
    case = make_case(21, 139, 150, sizes=sizes, before=0 if sizes is None else 2, dtype=dtype)
    w8 = quantized_w(case.w, recipe, "both")

    found = y_and_dx(case, w8, recipe, run, quantize_lhs=False)
    for name, got, want in zip(("y", "dx"), found, reference(case, w8), strict=True):
        assert got.dtype == dtype
        assert_close(got, want, dtype, name=name, scale=10 if run == "gpu" else 1)
        assert not np.asarray(got)[case.outside].any()


@pytest.mark.parametrize("M", [0, 1])
def test_no_row_and_one(M):
    case = make_case(M, 64, 48)
    w8 = quantized_w(case.w, "blockwise", "both")
    y = jaxops.fp8_matmul(case.x, w8, quantize_lhs=False, backend="xla")
    assert_close(y, reference(case, w8)[0], "float32")


def test_rows_are_not_cast():
    """Rows that FP8 would round to others are kept: 1 + 1/64 has no neighbour nearer than 1/16 in e4m3."""
    w8 = jaxops.quantize(jnp.eye(128), scaling="block_128x128", layouts="col")
    x = jnp.full((1, 128), 1 + 1 / 64)
    kept, cast = (jaxops.fp8_matmul(x, w8, quantize_lhs=each, backend="xla") for each in (False, True))
    np.testing.assert_array_equal(kept, x)
    assert float(jnp.max(jnp.abs(cast - x))) > 0  # 448 / (1 + 1/64) is no power of two


OWN = [(1, 1100, 130, None), (9, 1024, 3, None), (20, 130, 1030, None), (130, 1030, 9, None)]
OWN += [(8, 200, 1100, (3, 0, 5)), (40, 1030, 70, (21, 0, 19))]


@pytest.mark.parametrize("run", ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_own_tiles(run):
    """Of the plan's choice: sums that are split and not, of whole steps and not; few columns."""
    for M, K, N, sizes in OWN:
        case = make_case(M, K, N, sizes=sizes, before=0, dtype="bfloat16")
        w8 = quantized_w(case.w, "blockwise", "both")
        found = y_and_dx(case, w8, "blockwise", "own", quantize_lhs=False)
        for name, got, want in zip(("y", "dx"), found, reference(case, w8), strict=True):
            scale = 10 if run == "gpu" else 1
            assert_close(got, want, "bfloat16", name=f"{name} of {M, K, N, sizes}", scale=scale)


def test_wrong_arguments():
    x, w = jnp.ones((2, 128)), jnp.ones((128, 32))
    w8 = jaxops.quantize(w, scaling="block_128x128", layouts="col")
    x8 = jaxops.quantize(x, scaling="block_1x128")
    for lhs, rhs in ((x, w), (x8, w8)):
        with pytest.raises(ValueError, match="multiplies an array lhs by a quantized rhs"):
            jaxops.fp8_matmul(lhs, rhs, quantize_lhs=False)
    with pytest.raises(ValueError, match="use recipe='tensorwise'"):
        jaxops.fp8_matmul(x, w, recipe="delayed", amax=(jnp.ones(()), jnp.ones(())), quantize_lhs=False)
    with pytest.raises(TypeError, match="quantize_lhs"):
        jaxops.fp8_matmul(x, w8, quantize_lhs=0)
