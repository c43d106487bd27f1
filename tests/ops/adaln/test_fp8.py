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
from tests.ops.adaln.cases import KERNELS, RUNS, Variant, make_case
from tests.window import window

MOST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# Half an ulp: relative to a normal number (3 and 2 bits of mantissa), and half the least subnormal.
RELATIVE = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
ABSOLUTE = {"float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}


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
    names = ("x", "scale", "shift") if op == "adaln" else ("x", "h", "gate", "scale", "shift")
    options = {
        "norm": variant.norm,
        "activation": variant.activation,
        "out_dtype": dtype,
        "plan": variant.plan_for(run),
    }
    return jax.jit(lambda case: getattr(jaxops, op)(*(case[name] for name in names), case["offsets"], **options))


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
def test_a_row_of_zeros_is_exact(run):
    x, options = (
        np.zeros((2, 130), np.float32),
        {"out_dtype": "float8_e4m3fn", "plan": Variant(plan="wide").plan_for(run)},
    )
    q = jax.jit(functools.partial(jaxops.adaln, **options))(x, x[:1], x[:1])
    assert not dequantised(q).any()
    assert (np.asarray(q.scales) > 0).all()


@pytest.mark.parametrize("run", RUNS)
def test_what_is_not_finite(run):
    """An infinity in a shift is NaN in the result, and reaches no scale; nor does NaN."""
    x, options = (
        np.random.default_rng(0).normal(size=(3, 130)).astype(np.float32),
        {"out_dtype": "float8_e4m3fn", "plan": Variant(plan="wide").plan_for(run)},
    )
    shift = np.zeros((1, 130), np.float32)
    x[:, :3] = 0  # under the layer norm's mean and deviation: small beside the others
    f = jax.jit(functools.partial(jaxops.adaln, **options))
    want = f(x, np.zeros_like(shift), shift)
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


@pytest.mark.parametrize("run", RUNS)
def test_size_zero(run):
    f = jax.jit(functools.partial(jaxops.adaln, out_dtype="float8_e4m3fn", plan=Variant().plan_for(run)))
    for T, D, B in ((0, 5, 2), (5, 0, 2), (5, 200, 0)):
        ones = [np.ones((rows, D), np.float32) for rows in (T, B, B)]
        q = f(*ones, np.zeros(B + 1, np.int32))
        assert (q.values.shape, q.scales.shape) == ((T, D), (-(-D // 128), T))
        assert not dequantised(q).any()


@pytest.mark.parametrize("run", KERNELS)
def test_vmap(run):
    """Both leaves of a `Quantized` are mapped."""
    case = make_case([3, 2], 5)
    f = forward("adaln", Variant(plan="wide"), run, "float8_e4m3fn")
    x = np.asarray(case["x"])
    xs = np.stack([x, 3 * x[::-1]])
    got = jax.jit(jax.vmap(lambda x: f(case | {"x": x})))(xs)
    for i in range(2):
        want = f(case | {"x": xs[i]})
        np.testing.assert_array_equal(
            dequantised(jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], got)), dequantised(want)
        )


@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize("batch", [1, 3])
def test_more_than_int32_reaches(run, batch):
    """A result of more rows than asked, or a batch one after another: the same bits."""
    case = make_case([9, 5, 0, 16], 40)
    f = forward("adaln", Variant(plan="steps"), run, "float8_e4m3fn")
    xs = np.stack([np.roll(case["x"], i, axis=1) for i in range(batch)])
    want = [f(case | {"x": x}) for x in xs]
    with window(1000 if batch == 1 else 2000):  # 1,200 numbers each
        got = jax.jit(
            jax.vmap(lambda x: f(case | {"x": x}))
            if batch > 1
            else lambda xs: jax.tree.map(lambda leaf: leaf[None], f(case | {"x": xs[0]}))
        )(xs)
    for i in range(batch):
        np.testing.assert_array_equal(
            np.asarray(got.values[i]).view(np.uint8), np.asarray(want[i].values).view(np.uint8)
        )
        np.testing.assert_array_equal(got.scales[i], want[i].scales)
