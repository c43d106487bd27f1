"""FP8 results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.fp8 import BLOCK, Quantized
from jaxops.ops.adaln.reference import adaln_reference, gated_residual_reference
from tests.compare import assert_close
from tests.ops.adaln.cases import KERNELS, RUNS, Variant, make_case

MOST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# Half an ulp: relative to a normal number (3 and 2 bits of mantissa), and half the least subnormal.
RELATIVE = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
ABSOLUTE = {"float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}


def columns_of(scales, D: int) -> np.ndarray:
    """Each element's scale, of scales [blocks, T]."""
    return np.repeat(np.asarray(scales).T, BLOCK, axis=1)[:, :D]


def dequantised(q: Quantized) -> np.ndarray:
    return np.asarray(q.values.astype(jnp.float32)) * columns_of(q.scales, q.values.shape[1])


def check_quantised(q: Quantized, want, dtype: str, slack: float = 2e-5) -> None:
    """q holds `want` to half an ulp of its format; slack, over the RMS: by how much the numbers that were cast may differ from want."""
    want = np.asarray(want)
    T, D = want.shape
    assert (q.values.shape, q.values.dtype) == ((T, D), jnp.dtype(dtype))
    assert (q.scales.shape, q.scales.dtype) == ((-(-D // BLOCK), T), jnp.float32)
    assert q.scaling == "block_1x128"
    slack *= np.sqrt(np.mean(want.astype(np.float64) ** 2))
    padded = np.pad(np.abs(want), ((0, 0), (0, -D % BLOCK))).reshape(T, -1, BLOCK)
    largest = padded.max(-1).T
    # The largest magnitude is rounded up to bfloat16.
    assert (np.asarray(q.scales) * MOST[dtype] >= largest * (1 - 1e-6) - 2 * slack).all()
    assert (np.asarray(q.scales) * MOST[dtype] <= largest * (1 + 2.0**-7) + 4 * slack + 2.0**-91).all()
    bound = np.maximum(RELATIVE[dtype] * np.abs(want), ABSOLUTE[dtype] * columns_of(q.scales, D)) + 2 * slack
    error = np.abs(dequantised(q) - want)
    assert (error <= bound).all(), f"{(error / bound).max()} times the bound"
    # A rounding of every number that is a little worse would stay under that bound: the mean error over an ulp is a quarter of it or less.
    assert np.mean(error) <= 0.5 * np.mean(bound)


def forward(op: str, variant: Variant, run: str, dtype: str):
    """jitted, from a case to the op's result."""
    names = ("x", "scale", "shift") if op == "adaln" else ("x", "h", "gate", "scale", "shift")
    options = {"norm": variant.norm, "activation": variant.activation, "out_dtype": dtype, "plan": variant.plan_for(run)}
    return jax.jit(lambda case: getattr(jaxops, op)(*(case[name] for name in names), case["offsets"], **options))


# 300 columns are three blocks of 128, the last of 44; one array of 64 columns is made 128 wide, one of 512 holds four blocks.
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("D", "dtype", "variant"),
    [
        (300, "float8_e4m3fn", Variant(plan="steps")),
        (128, "float8_e5m2", Variant(norm="rms", plan="ahead")),
        (37, "float8_e4m3fn", Variant(activation="silu", plan="wide")),
        (300, "float8_e5m2", Variant(norm="rms", plan="wide")),
    ],
    ids=["300-e4m3", "128-e5m2", "37-e4m3", "300-e5m2"],
)
def test_adaln(run, D, dtype, variant):
    case = make_case([7, 0, 11, 3], D, before=2, after=3)
    # One bad number in a shift: of the rows of its sequence that column is NaN, its block's scale is that of the others. A tiny and a huge row.
    case |= {"shift": case["shift"].at[3, 2].set(jnp.nan), "x": case["x"].at[4].multiply(1e-12).at[5].multiply(1e12)}
    q = forward("adaln", variant, run, dtype)(case)
    x = jnp.where(jnp.isnan(case["x"]), 0, case["x"])
    want = np.array(adaln_reference(x, case["scale"], jnp.nan_to_num(case["shift"]), case["offsets"], norm=variant.norm, activation=variant.activation))
    assert np.isnan(np.asarray(q.values.astype(jnp.float32))[20:23, 2]).all()
    want[20:23, 2] = 0
    values = q.values.at[20:23, 2].set(0)
    check_quantised(Quantized(values, q.scales), want, dtype)
    outside = np.r_[0:2, 23:26]
    assert not dequantised(q)[outside].any()
    assert np.isfinite(np.asarray(q.scales)).all()


@pytest.mark.parametrize("run", RUNS)
def test_gated(run):
    dtype = "float8_e4m3fn"
    case = make_case([7, 0, 11, 3], 37, dtype="bfloat16", before=2, after=3)
    new, q = forward("gated_residual_adaln", Variant(plan="wide"), run, dtype)(case)
    assert new.dtype == jnp.bfloat16
    inside = slice(2, 23)
    assert_close(new[inside], gated_residual_reference(case["x"], case["h"], case["gate"], case["offsets"])[inside], "bfloat16")
    new = jnp.where(jnp.isnan(new), 0, new)
    check_quantised(q, adaln_reference(new, case["scale"], case["shift"], case["offsets"]), dtype)


@pytest.mark.parametrize("run", RUNS)
def test_a_row_of_zeros_is_exact(run):
    x = jnp.zeros((2, 130))
    q = jaxops.adaln(x, x[:1], x[:1], out_dtype="float8_e4m3fn", plan=Variant(plan="wide").plan_for(run))
    assert not dequantised(q).any()
    assert (np.asarray(q.scales) > 0).all()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("op", ["adaln", "gated_residual_adaln"])
def test_no_gradient(run, op):
    case = make_case([4], 8)
    f = forward(op, Variant(), run, "float8_e5m2")
    with pytest.raises(NotImplementedError, match=r"float8_e5m2 has no gradient.*leave out_dtype away"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.tree.leaves(f(case | {"x": x}))[-1])), case["x"])


@pytest.mark.parametrize("run", RUNS)
def test_size_zero(run):
    for T, D, B in ((0, 5, 2), (5, 0, 2), (5, 200, 0)):
        offsets = jnp.zeros(B + 1, jnp.int32)
        q = jaxops.adaln(jnp.ones((T, D)), jnp.ones((B, D)), jnp.ones((B, D)), offsets, out_dtype="float8_e4m3fn", plan=Variant().plan_for(run))
        assert (q.values.shape, q.scales.shape) == ((T, D), (-(-D // 128), T))
        assert not dequantised(q).any()


@pytest.mark.parametrize("run", KERNELS)
def test_vmap(run):
    """Both leaves of a `Quantized` are mapped."""
    case = make_case([3, 2], 5)
    f = forward("adaln", Variant(plan="wide"), run, "float8_e4m3fn")
    xs = jnp.stack([case["x"], 3 * case["x"][::-1]])
    got = jax.vmap(lambda x: f(case | {"x": x}))(xs)
    for i in range(2):
        want = f(case | {"x": xs[i]})
        np.testing.assert_array_equal(dequantised(jax.tree.map(lambda leaf, i=i: leaf[i], got)), dequantised(want))
