"""FP8 scales and casts: the same bits from every compiler, and why."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxops import dequantize
from jaxops._lib.numerics.fp8 import (
    _FACTOR_BITS,
    AMAX_MAX,
    AMAX_MIN,
    FP8,
    Quantized,
    cast_saturating,
    infinity_to_nan,
    magnitudes,
    scale_and_factor,
)
from tests.ops.quantize.cases import ABSOLUTE, MOST, RELATIVE, np_cast, np_scale

pytestmark = pytest.mark.versions


@pytest.mark.parametrize("dtype", FP8)
def test_a_quotient_that_is_some_ulp_off_changes_no_factor(dtype):
    """For all 128 mantissas it is at least 8 ulp from a rounding boundary."""
    mantissas = np.float32(1) + np.arange(128, dtype=np.float32) / 128
    quotient = (np.float32(MOST[dtype]) / mantissas).view(np.int32)
    drop = 24 - _FACTOR_BITS
    distance = np.abs((quotient & ((1 << drop) - 1)) - (1 << (drop - 1)))
    assert distance.min() >= 8

    def rounded(bits):
        return (bits + (1 << (drop - 1))) & ~((1 << drop) - 1)

    for off in range(-7, 8):
        np.testing.assert_array_equal(rounded(quotient + off), rounded(quotient))


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("dtype", FP8)
def test_a_root_as_far_off_as_a_gpu_may_give_it_changes_no_factor(dtype, off, monkeypatch):
    """rsqrt.approx.f32 has a relative error of at most 2**-22.9 (PTX manual)."""
    amax = lax.bitcast_convert_type(jnp.arange(0x7F80, dtype=jnp.int16), jnp.bfloat16).astype(jnp.float32)

    def root(x):
        exact = 1 / np.sqrt(np.asarray(x, np.float64))
        return jnp.asarray((exact * (1 + off * 2**-22.9)).astype(np.float32))

    factors = [scale_and_factor(amax, dtype, is_bfloat16=True)[1]]
    monkeypatch.setattr(lax, "rsqrt", root)
    factors.append(scale_and_factor(amax, dtype, is_bfloat16=True)[1])
    np.testing.assert_array_equal(*factors)


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", FP8)
def test_scale_and_factor(dtype, pow2):
    """All bfloat16 mantissas at both ends and in the middle of the exponents, numbers between them, and NaN."""
    mantissas = (1 + np.arange(128) / 128)[:, None] * (1 + np.array([0, 2.0**-23, 2.0**-8, 2.0**-7.01]))
    amax = (mantissas[..., None] * 2.0 ** np.array([-140, -93, -92, -91, -20, 0, 1, 90, 126, 127])).ravel()
    amax = np.minimum(amax, np.finfo(np.float32).max).astype(np.float32)
    amax = np.concatenate(
        [amax, np.array([0, np.inf, 448, 57344, 1e-45, np.finfo(np.float32).max, AMAX_MIN, AMAX_MAX], np.float32)]
    )
    scale, factor = (np.asarray(a) for a in jax.jit(functools.partial(scale_and_factor, dtype=dtype, pow2=pow2))(amax))
    want = np_scale(amax, dtype, pow2)
    np.testing.assert_array_equal(scale.view(np.uint32), want[0].view(np.uint32))
    np.testing.assert_array_equal(factor.view(np.uint32), want[1].view(np.uint32))
    if pow2:
        assert (np.frexp(scale)[0] == 0.5).all()
        np.testing.assert_array_equal(scale * factor, 1)
        kept = np.clip(amax, AMAX_MIN, AMAX_MAX)
        assert (kept.astype(np.float64) * factor <= MOST[dtype]).all()
        assert (kept.astype(np.float64) * factor > 0.49 * MOST[dtype]).all()
    else:
        np.testing.assert_allclose(scale.astype(np.float64) * factor, 1, rtol=2.0**-15)
    nothing, zero = (scale_and_factor(jnp.float32(value), dtype, pow2) for value in (np.nan, 0))
    assert nothing == zero


@pytest.mark.parametrize("pow2", [False, True])
def test_scale_of_a_bfloat16_maximum(pow2):
    amax = jnp.append(lax.bitcast_convert_type(jnp.arange(0x7F80, dtype=jnp.int16), jnp.bfloat16), jnp.nan)
    amax = amax.astype(jnp.float32)
    for got, want in zip(
        scale_and_factor(amax, FP8[0], pow2, is_bfloat16=True), scale_and_factor(amax, FP8[0], pow2), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", FP8)
def test_a_bfloat16_maximum_becomes_the_largest_number(dtype):
    amax = jnp.arange(1, 60_000, 7, dtype=jnp.float32).astype(jnp.bfloat16).astype(jnp.float32)
    scale, factor = scale_and_factor(amax, dtype)
    np.testing.assert_array_equal(
        cast_saturating(amax * factor, dtype).astype(jnp.float32), np.full(amax.shape, MOST[dtype], np.float32)
    )
    np.testing.assert_allclose(scale * MOST[dtype], amax, rtol=1e-6)


@pytest.mark.parametrize("dtype", FP8)
def test_cast_saturates(dtype):
    """Beyond the largest number and infinities: the largest; NaN: NaN; ties to even; the rest as numpy's own cast."""
    most, least = MOST[dtype], 2 * ABSOLUTE[dtype]
    values = np.array(
        [most, 1.1 * most, np.inf, -1e30, -np.inf, np.nan, 0, 1, least, 1 + RELATIVE[dtype], 1 + 3 * RELATIVE[dtype]],
        np.float32,
    )
    want = np.array([most, most, most, -most, -most, np.nan, 0, 1, least, 1, 1 + 4 * RELATIVE[dtype]], np.float32)
    cast = jax.jit(functools.partial(cast_saturating, dtype=dtype))
    got = cast(values)
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(got.astype(jnp.float32), want)
    rng = np.random.default_rng(0)
    values = (rng.normal(size=100_000) * 2.0 ** rng.integers(-25, 18, 100_000)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(cast(values)).view(np.uint8), np_cast(values, dtype).view(np.uint8))


def test_magnitudes_leave_out_what_is_not_finite():
    np.testing.assert_array_equal(
        magnitudes(jnp.array([np.nan, -2, np.inf, -np.inf, -0.0], jnp.bfloat16)), np.array([0, 2, 0, 0, 0], np.float32)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_infinity_to_nan(dtype):
    largest = float(jnp.finfo(dtype).max)
    x = np.array([np.inf, -np.inf, np.nan, largest, -largest, -0.0, 0.0, -1.5], jnp.dtype(dtype))
    got = jax.jit(infinity_to_nan)(x)
    assert got.dtype == jnp.float32
    assert np.isnan(got[:3]).all()
    np.testing.assert_array_equal(np.asarray(got[3:]).view(np.int32), x[3:].astype(np.float32).view(np.int32))


def test_transpose():
    q = Quantized(
        jnp.ones((2, 3)), jnp.ones((1, 2)), jnp.zeros((3, 2)), jnp.zeros((1, 3)), scaling="block_1x128", dtype="float32"
    )
    assert q.T.values.shape == (3, 2)
    assert q.T.scales.shape == (1, 3)
    assert q.T.values_t is q.values
    assert q.T.T.values is q.values


def test_from_deepseek():
    """weight_scale_inv multiplies: w of y = x @ w is the transposed weight, dequantised."""
    rng = np.random.default_rng(0)
    N, K = 130, 300
    weight = jnp.asarray(rng.normal(size=(N, K)), jnp.float8_e4m3fn)
    inverse = jnp.asarray(rng.uniform(0.5, 2, size=(2, 3)), jnp.float32)
    q = Quantized.from_deepseek(weight, inverse)
    assert (q.values, q.scaling, q.dtype) == (None, "block_128x128", "bfloat16")
    want = np.asarray(weight.astype(jnp.float32)) * np.repeat(np.repeat(np.asarray(inverse), 128, 0), 128, 1)[:N, :K]
    np.testing.assert_array_equal(dequantize(q, jnp.float32), want.T)
    stack = Quantized.from_deepseek(jnp.stack([weight, weight]), jnp.stack([inverse, 2 * inverse]))
    np.testing.assert_array_equal(dequantize(stack, jnp.float32)[1], 2 * want.T)
    with pytest.raises(ValueError, match=r"weight_scale_inv has shape \(3, 2\).*needs \(2, 3\)"):
        Quantized.from_deepseek(weight, inverse.T)
    with pytest.raises(TypeError, match=r"weight is bfloat16.*jaxops\.quantize"):
        Quantized.from_deepseek(weight.astype(jnp.bfloat16), inverse)
    with pytest.raises(TypeError, match=r"weight_scale_inv is bfloat16.*astype\(jnp\.float32\)"):
        Quantized.from_deepseek(weight, inverse.astype(jnp.bfloat16))
