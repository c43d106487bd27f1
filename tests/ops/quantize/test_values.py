"""Values and scales, to the last bit, of every scaling, layout, dtype and rounding."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.quantize import Format, Tiles, cast
from tests.jaxprs import same_program
from tests.ops.quantize.cases import (
    E4M3,
    E5M2,
    KERNELS,
    KEY,
    RUNS,
    SCALINGS,
    Variant,
    backend_of,
    bits_of,
    check_equal,
    check_stack,
    compiled,
    make_x,
    np_quantize,
)
from tests.window import window

SHAPE = (150, 261)  # two tiles and three, neither of them full
BOTH = [(SHAPE, "bfloat16", Variant(scaling)) for scaling in SCALINGS]
# The kernels' loops are other ones for one layout. XLA's two layouts are the same computation, together or alone.
ONE = [
    (SHAPE, "bfloat16", Variant(scaling, layouts))
    for layouts, scaling in (("row", "rowwise"), ("row", "block_1x128"), ("col", "block_1x128"), ("col", "tensorwise"))
]
OTHERS = [
    (SHAPE, "float32", Variant("block_128x128", "both", E5M2, pow2=True)),
    (SHAPE, "float32", Variant("tensorwise", "row", E5M2)),
    (SHAPE, "float16", Variant("rowwise", "row", pow2=True)),
    (SHAPE, "float16", Variant("block_1x128", "both", E5M2)),
    (SHAPE, "float32", Variant(stochastic=True)),
    (SHAPE, "float32", Variant("tensorwise", "row", E5M2, pow2=True, stochastic=True)),
    # 1, primes, whole tiles, a tile and one more.
    ((1, 263), "bfloat16", Variant("rowwise", "row")),
    ((257, 1), "bfloat16", Variant()),
    ((128, 256), "bfloat16", Variant()),
    ((128, 512), "bfloat16", Variant("tensorwise", "row")),
    ((1025, 5), "bfloat16", Variant("tensorwise", "row")),  # one largest magnitude; of few rows a part for each row
]
LARGE = [  # many tiles on every multiprocessor, and widths with and without 16-byte loads
    (*case, Variant(scaling, layouts))
    for case in (((4096, 3072), "bfloat16"), ((1000, 4090), "bfloat16"), ((513, 20_000), "bfloat16"))
    for scaling, layouts in itertools.product(SCALINGS, ("row", "both"))
]


def check(run: str, variant: Variant, x: jax.Array) -> None:
    check_equal(compiled(run, variant)(x), np_quantize(x, variant), variant)


@pytest.mark.parametrize(
    ("run", "case"),
    [
        *itertools.product(["xla"], BOTH + OTHERS),
        *itertools.product(["interpret"], BOTH + ONE + OTHERS),
        *(
            pytest.param(*each, marks=pytest.mark.gpu)
            for each in itertools.product(["gpu", "gpu-xla"], BOTH + ONE + OTHERS + LARGE)
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)),
)
def test_values(run, case):
    shape, dtype, variant = case
    check(run, variant, make_x(shape, dtype, seed=1))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_nothing_but_nan_or_zeros(run, scaling):
    for value in (0.0, np.nan, -np.inf):
        check(run, Variant(scaling), jnp.full(SHAPE, value, jnp.bfloat16))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_nothing(run, scaling):
    shapes = [(0, 5), (5, 0), (0, 0)]
    quantize, arrays = compiled(run, Variant(scaling)), [np.zeros(shape, np.float32) for shape in shapes]
    if run == "interpret":
        assert all(same_program(quantize, compiled("xla", Variant(scaling)), x) for x in arrays)
        return
    found = jax.jit(lambda arrays: [(q, jaxops.dequantize(q)) for q in map(quantize, arrays)])(arrays)
    for (M, K), (q, x) in zip(shapes, found, strict=True):
        down, across = -(-M // 128), -(-K // 128)
        blocks = {"tensorwise": (), "rowwise": (M,), "block_1x128": (across, M), "block_128x128": (down, across)}
        assert (q.values.shape, q.values_t.shape, q.scales.shape, x.shape) == ((M, K), (K, M), blocks[scaling], (M, K))
        assert np.isfinite(np.asarray(q.scales)).all()


# What tuning may choose instead of the heuristic's tiles, from one to many warps.
@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize(
    "variant",
    [
        Variant("block_1x128", "both", tile=Tiles(128, 128, 4, 8, 4, 1)),
        Variant("block_1x128", "col", tile=Tiles(128, 64, 32, 2, 4, 2)),
        Variant("block_1x128", "row", tile=Tiles(8, 256, warps=2, panel=4)),
        Variant("tensorwise", "row", tile=Tiles(32, 64, warps=2)),
        # A row does not fit: as with very long rows, another pass looks first.
        Variant("rowwise", "row", tile=Tiles(8, 128, warps=1)),
    ],
    ids=lambda v: f"{v}-{v.tile.rows}x{v.tile.cols}",
)
def test_tiles(run, variant):
    x = np.random.default_rng(3).normal(size=SHAPE).astype(jnp.bfloat16)
    x[-1, -1] = 100  # the largest comes last
    check(run, variant, x)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("scaling", ["tensorwise", "block_128x128"])
def test_stack(run, scaling):
    """Each tensor of a stack is quantised by itself, and under vmap alike."""
    x = make_x((2, 130, 40), seed=4) * jnp.array([0.01, 30], jnp.bfloat16)[:, None, None]
    f, dequantize = compiled(run, Variant(scaling)), jax.jit(jaxops.dequantize)
    got, mapped = f(x), jax.jit(jax.vmap(f))(x)
    check_stack(got, x, Variant(scaling))
    check_stack(mapped, x, Variant(scaling))
    one = dequantize(jax.tree.map(lambda leaf: np.asarray(leaf)[1], got))
    np.testing.assert_array_equal(bits_of(dequantize(got))[1], bits_of(one))


@pytest.mark.parametrize("run", RUNS)
def test_matrices_of_a_stack_round_differently(run):
    """By the rows of all, one below another: equal matrices are not rounded alike."""
    variant, x = Variant("rowwise", stochastic=True), make_x((8, 120), "float32", seed=4)
    want = np_quantize(np.concatenate([x, x, x]), dataclasses.replace(variant, layouts="row"))
    q = compiled(run, variant)(jnp.stack([x, x, x]))
    np.testing.assert_array_equal(bits_of(q.values).reshape(24, 120), bits_of(want["values"]))
    for values in (q.values, q.values_t):
        assert (bits_of(values[0]) != bits_of(values[1])).mean() > 0.1


def test_keys():
    """New ones and old ones, and what is none. Bits of one key: test_values, by cases.py's own hash."""
    x = jax.random.normal(jax.random.key(0), (8, 130))
    quantize = jax.jit(lambda x, *keys: [jaxops.quantize(x, key=key).values for key in keys])
    a, b, c = map(bits_of, quantize(x, KEY, jax.random.key_data(KEY), jax.random.key(8)))
    np.testing.assert_array_equal(a, b)
    assert (c != a).mean() > 0.1
    with pytest.raises(TypeError):
        jaxops.quantize(x, key=jnp.ones(2))


@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize(
    ("variant", "mapped"),
    [(Variant("tensorwise", "row", stochastic=True), False), (Variant("block_1x128"), True)],
    ids=str,
)
def test_more_than_int32_reaches(run, variant, mapped):
    """A stack as an array of more rows, a batch one matrix after another: the same bits."""
    x = make_x((2, 30, 140), seed=4)

    def bits(run: str) -> list[np.ndarray]:
        f = jax.jit(jax.vmap(compiled(run, variant)) if mapped else compiled(run, variant))
        return [bits_of(leaf) for leaf in jax.tree.leaves(f(x))]

    want = bits("xla")
    with window(5000):
        got = bits(run)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("run", RUNS)
def test_given_amax(run):
    """Delayed scaling: x is cast with a given amax, larger numbers saturate; the same pass measures x's own, which has
    no infinity and no NaN."""
    x = np.array(make_x((2, *SHAPE), seed=5))
    x[np.abs(x) >= 1e4] = 0
    x[0, 3, 4], x[1, 5, 6] = np.nan, np.inf
    form, largest = Format("tensorwise"), np.abs(np.where(np.isfinite(x), x, 0).astype(np.float32)).max(axis=(1, 2))
    how = {"measure": True, "backend": backend_of(run)}
    measured = jax.jit(lambda x, amax: cast(x, form, "both", amax=amax, **how))
    for amax in ((0.5, 1e6), (0.0, np.inf)):
        q, now = measured(x, jnp.asarray(amax, jnp.float32))
        check_stack(q, x, Variant("tensorwise"), amax)
        np.testing.assert_array_equal(now, largest)
    q, now = jax.jit(lambda x: cast(x, form, "row", **how))(x[0])
    check_equal(q, np_quantize(x[0], Variant("tensorwise", "row")), Variant("tensorwise", "row"))
    assert (now.shape, now.dtype, float(now)) == ((), jnp.float32, largest[0])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_what_overflows_only_times_the_factor_saturates(run, stochastic):
    """Under a given amax far below it: finite numbers become the largest, infinities NaN, and -0 stays what it is."""
    x = np.zeros((3, 130), jnp.bfloat16)
    x[0, :6] = 3e38, -3e38, np.inf, -np.inf, np.nan, -0.0
    how = {"layouts": "both", "key": KEY if stochastic else None, "backend": backend_of(run)}
    q = jax.jit(lambda x: jaxops.quantize(x, scaling="tensorwise", amax=jnp.float32(1e-20), **how))(x)
    for values in (np.asarray(q.values)[0, :6], np.asarray(q.values_t)[:6, 0]):
        np.testing.assert_array_equal(values.astype(np.float32), [448, -448, np.nan, np.nan, np.nan, 0])
        assert np.signbit(values.astype(np.float32)[5])


@pytest.mark.parametrize(("scaling", "dtype"), list(zip(SCALINGS, (E4M3, E5M2, E4M3, E5M2), strict=True)))
def test_dequantize(scaling, dtype):
    """Half a step of what was there, from both layouts, in the dtype that was there; NaN for what is not finite."""
    x = jax.random.normal(jax.random.key(0), SHAPE).at[7, 9].set(jnp.inf).astype(jnp.bfloat16)
    q = compiled("xla", Variant(scaling, dtype=dtype))(x)
    half, column = 2.0**-4 if dtype == E4M3 else 2.0**-3, dataclasses.replace(q, values=None, scales=None)
    dequantize = jax.jit(lambda q: [jaxops.dequantize(q), jaxops.dequantize(q.T).T, jaxops.dequantize(column)])
    size = np.abs(np.asarray(x, np.float32))
    for found in dequantize(q):
        assert found.dtype == jnp.bfloat16
        error = np.abs(np.asarray(found - x, np.float32))
        assert np.argwhere(np.isnan(error)).tolist() == [[7, 9]]
        error[7, 9] = 0
        assert (error <= 1.02 * half * size + 2e-4).all()
        assert error.mean() > 0.1 * half * size[np.isfinite(size)].mean()  # or it was not quantised
    assert jax.eval_shape(lambda q: jaxops.dequantize(q, jnp.float16), q).dtype == jnp.float16
    with pytest.raises(TypeError, match=r"q is a.*jaxops\.quantize"):
        jaxops.dequantize(x)


def test_no_gradient():
    """A cast's gradient is the product's business: an error says so, and stop_gradient is let through."""
    scales = lambda x: jaxops.quantize(x, backend="pallas").scales.sum()
    x = make_x((40, 133), "float32")
    says = r"float8_e4m3fn has no gradient of its own.*jaxops\.fp8_matmul.*stop_gradient"
    for derivative in (jax.grad(scales), lambda x: jax.jvp(scales, (x,), (x,))):
        with pytest.raises(NotImplementedError, match=says):
            jax.eval_shape(derivative, x)
    jax.eval_shape(jax.grad(lambda x: scales(jax.lax.stop_gradient(x)) + x.sum()), x)
