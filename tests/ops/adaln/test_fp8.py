"""FP8 results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.numerics.fp8 import BLOCK, Quantized
from jaxops.ops.adaln.reference import adaln_reference, gated_residual_reference
from tests.compare import assert_close
from tests.ops.adaln.cases import OPERANDS, RUNS, Variant, make_case
from tests.ops.quantize.cases import ABSOLUTE, MOST, RELATIVE


def columns_of(scales, D: int) -> np.ndarray:
    """Each element's scale, of scales [blocks, T]."""
    return np.repeat(np.asarray(scales).T, BLOCK, axis=1)[:, :D]


def dequantised(q: Quantized) -> np.ndarray:
    return np.asarray(q.values).astype(np.float32) * columns_of(q.scales, q.values.shape[1])


def check_quantised(q: Quantized, want, dtype: str, slack: float = 2e-5) -> None:
    """q is `want` to half an ulp of its format. slack, over the RMS: error of the numbers before the cast."""
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
    # The bound alone would let a slightly worse rounding pass: the mean error is at most a quarter of an ulp.
    assert np.mean(error) <= 0.5 * np.mean(bound)


def forward(op: str, variant: Variant, run: str, dtype: str):
    """jitted, from a case to the op's result."""
    names = OPERANDS[op]
    options = {"norm": variant.norm, "activation": variant.activation, "plan": variant.plan_for(run)}
    return jax.jit(
        lambda case: getattr(jaxops, op)(*(case[name] for name in names), case["offsets"], out_dtype=dtype, **options)
    )


# 300 columns are blocks of 128, 128 and 44; an array of 64 columns is widened to 128, one of 512 holds four blocks.
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("D", "dtype", "variant"),
    [
        (300, "float8_e4m3fn", Variant(plan="steps")),
        (128, "float8_e5m2", Variant(norm="rms", plan="ahead")),
        (37, "float8_e4m3fn", Variant(activation="silu", plan="wide")),
        pytest.param(300, "float8_e5m2", Variant(norm="rms", plan="wide"), marks=pytest.mark.gpu),
    ],
    ids=["300-e4m3", "128-e5m2", "37-e4m3", "300-e5m2"],
)
def test_adaln(run, D, dtype, variant):
    case = make_case([7, 0, 11, 3], D, before=2, after=3)
    # One NaN in a shift: NaN in that column of its sequence's rows, and no effect on scales. A tiny and a huge row.
    case = {name: np.array(value) for name, value in case.items()}
    case["shift"][3, 2] = np.nan
    case["x"][4] *= 1e-12
    case["x"][5] *= 1e12
    q = forward("adaln", variant, run, dtype)(case)
    x, shift = (np.nan_to_num(case[name]) for name in ("x", "shift"))
    reference = jax.jit(functools.partial(adaln_reference, norm=variant.norm, activation=variant.activation))
    want, values = np.array(reference(x, case["scale"], shift, case["offsets"])), np.array(q.values)
    assert np.isnan(values[20:23, 2].astype(np.float32)).all()
    want[20:23, 2], values[20:23, 2] = 0, 0
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
    new = np.asarray(new)
    assert_close(
        new[inside],
        np.asarray(jax.jit(gated_residual_reference)(case["x"], case["h"], case["gate"], case["offsets"]))[inside],
        "bfloat16",
    )
    new = np.where(np.isnan(new), 0, new).astype(new.dtype)
    check_quantised(q, jax.jit(adaln_reference)(new, case["scale"], case["shift"], case["offsets"]), dtype)


@pytest.mark.parametrize("run", RUNS)
def test_zeros_and_what_is_not_finite(run):
    """A row of zeros is exact. An infinity in a shift is NaN in the result, and reaches no scale; nor does NaN."""
    x, shift = np.random.default_rng(0).normal(size=(3, 130)).astype(np.float32), np.zeros((1, 130), np.float32)
    x[:, :3] = 0  # under the layer norm's mean and deviation: small beside the others
    x[2] = 0
    options = {"out_dtype": "float8_e4m3fn", "plan": Variant(plan="wide").plan_for(run)}
    f = jax.jit(functools.partial(jaxops.adaln, **options))
    want = f(x, np.zeros_like(shift), shift)
    assert not dequantised(want)[2].any()
    assert (np.asarray(want.scales) > 0).all()
    shift[0, :3] = np.inf, -np.inf, np.nan
    q = f(x, np.zeros_like(shift), shift)
    assert np.isnan(dequantised(q)[:, :3]).all()
    np.testing.assert_array_equal(dequantised(q)[:, 3:], dequantised(want)[:, 3:])
    np.testing.assert_array_equal(q.scales, want.scales)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("op", ["adaln", "gated_residual_adaln"])
def test_no_gradient(run, op):
    case = make_case([4], 8)
    f = forward(op, Variant(), run, "float8_e5m2")
    with pytest.raises(NotImplementedError, match=r"float8_e5m2 has no gradient.*leave out_dtype away"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.tree.leaves(f(case | {"x": x}))[-1])), case["x"])
