"""Values and scales, to the last bit, of every scaling, layout and dtype."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.quantize import Plan, Tiles, quantize_measured
from jaxops.ops.quantize.reference import quantize_reference
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
    compiled,
    make_x,
    np_quantize,
)
from tests.window import window

SHAPE = (150, 261)  # two tiles and three, neither of them full
LAYOUTS = ("row", "col", "both")


def check(run: str, variant: Variant, x: jax.Array) -> None:
    check_equal(compiled(run, variant)(x), np_quantize(x, variant), variant)


# XLA's two layouts are the same computation, together or alone. The kernels' loops are other ones for one layout.
@pytest.mark.parametrize(
    ("run", "layouts", "scaling"),
    [
        *itertools.product(("xla", "interpret"), ["both"], SCALINGS),
        ("interpret", "row", "rowwise"),
        ("interpret", "row", "block_1x128"),
        ("interpret", "col", "block_1x128"),
        ("interpret", "col", "tensorwise"),
        *(
            pytest.param(*all_, marks=pytest.mark.gpu)
            for all_ in itertools.product(("gpu", "gpu-xla"), LAYOUTS, SCALINGS)
        ),
    ],
)
def test_bfloat16(run, layouts, scaling):
    check(run, Variant(scaling, layouts), make_x(SHAPE))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("dtype", "variant"),
    [
        ("float32", Variant("block_128x128", "both", E5M2, pow2=True)),
        ("float32", Variant("tensorwise", "row", E5M2)),
        ("float16", Variant("rowwise", "row", pow2=True)),
        ("float16", Variant("block_1x128", "both", E5M2)),
    ],
    ids=str,
)
def test_dtypes(run, dtype, variant):
    check(run, variant, make_x(SHAPE, dtype, seed=1))


# 1, primes, whole tiles, a tile and one more.
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("shape", "variant"),
    [
        ((1, 263), Variant("rowwise", "row")),
        ((257, 1), Variant()),
        ((128, 256), Variant()),
        ((128, 512), Variant("tensorwise", "row")),
        ((1025, 5), Variant("tensorwise", "row")),  # many rows: one largest magnitude; of few a part for each row
    ],
    ids=str,
)
def test_shapes(run, shape, variant):
    check(run, variant, make_x(shape, seed=2))


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


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_nothing_but_nan_or_zeros(run, scaling):
    """Finite scales; zeros come back as zeros, NaN and infinities as NaN."""
    dequantize = jax.jit(lambda q: jaxops.dequantize(q, jnp.float32))
    for value in (0.0, np.nan, -np.inf):
        got = compiled(run, Variant(scaling))(np.full(SHAPE, value, jnp.bfloat16))
        for scales in (got.scales, got.scales_t):
            assert np.isfinite(np.asarray(scales)).all()
            assert (np.asarray(scales) > 0).all()
        for q in (got, got.T):
            np.testing.assert_array_equal(
                dequantize(q), np.full(SHAPE if q is got else SHAPE[::-1], 0 * value, np.float32)
            )


# What tuning may choose instead of the heuristic's tiles, from one to many warps.
@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize(
    "variant",
    [
        Variant("block_1x128", "both", tile=Tiles(128, 128, 4, 8, 4, 1)),
        Variant("block_1x128", "col", tile=Tiles(128, 64, 32, 2, 4, 2)),
        Variant("block_1x128", "row", tile=Tiles(8, 256, warps=2, panel=4)),
        Variant("tensorwise", "row", tile=Tiles(32, 64, warps=2)),
        Variant(
            "rowwise", "row", tile=Tiles(8, 128, warps=1)
        ),  # a row does not fit into it: as with very long rows, another pass looks first
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
    """Each tensor of a stack is quantised by itself."""
    x = make_x((2, 130, 40), seed=4) * jnp.array([0.01, 30], jnp.bfloat16)[:, None, None]
    variant = Variant(scaling)
    got = compiled(run, variant)(x)
    for i in range(2):
        check_equal(jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], got), np_quantize(x[i], variant), variant)
    dequantize = jax.jit(jaxops.dequantize)
    np.testing.assert_array_equal(
        bits_of(dequantize(got))[1], bits_of(dequantize(jax.tree.map(lambda leaf: np.asarray(leaf)[1], got)))
    )


@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize(
    ("variant", "mapped"),
    [
        (Variant("tensorwise", "row", stochastic=True), False),
        (Variant("block_1x128"), True),
        (Variant("rowwise", "col"), False),
    ],
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
    """Delayed scaling: x is cast with a given amax, larger numbers saturate; the same pass measures x's own."""
    x = np.array(make_x(SHAPE, seed=5))
    x[9] = 3.0  # without that row's 1e38
    x[~np.isfinite(x) | (np.abs(x) >= 1e4)] = 0
    x[3, 4] = np.nan
    variant, plan = Variant("tensorwise"), Plan(backend_of(run))
    measured = jax.jit(lambda x, amax: quantize_measured(x, layouts="both", amax=amax, plan=plan))
    largest = np.nanmax(np.abs(np.asarray(x, np.float32)))
    for amax in (0.5, 1.0, 1e6, 0.0, np.inf):
        q, now = measured(x, jnp.float32(amax))
        check_equal(q, np_quantize(x, variant, amax=np.float32(amax)), variant)
        assert (now.shape, now.dtype, float(now)) == ((), jnp.float32, largest)
    row = dataclasses.replace(variant, layouts="row")
    q, now = jax.jit(lambda x: quantize_measured(x, layouts="row", plan=plan))(x)
    check_equal(q, np_quantize(x, row), row)
    assert float(now) == largest


@pytest.mark.parametrize("run", RUNS)
def test_given_amax_of_a_stack(run):
    x = make_x((2, 20, 130), seed=6)[:, :5]
    q, now = jax.jit(lambda x: quantize_measured(x, amax=jnp.array([1.0, 4.0]), backend=backend_of(run)))(x)
    for i, amax in enumerate((1.0, 4.0)):
        variant = Variant("tensorwise", "row")
        check_equal(
            jax.tree.map(lambda leaf, i=i: leaf[i], q), np_quantize(x[i], variant, amax=np.float32(amax)), variant
        )
    assert now.shape == (2,)
    sizes = np.abs(np.asarray(x, np.float32))
    assert np.isinf(sizes[0]).any()  # which the largest magnitude leaves out
    np.testing.assert_array_equal(now, np.max(np.where(np.isfinite(sizes), sizes, 0), axis=(1, 2)))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_what_overflows_only_times_the_factor_saturates(run, stochastic):
    """Under a given amax far below it: finite numbers become the largest, infinities NaN, and -0 stays what it is."""
    x = np.zeros((3, 130), jnp.bfloat16)
    x[0, :6] = 3e38, -3e38, np.inf, -np.inf, np.nan, -0.0
    options = {
        "scaling": "tensorwise",
        "layouts": "both",
        "key": KEY if stochastic else None,
        "backend": backend_of(run),
    }
    q = jax.jit(lambda x: jaxops.quantize(x, amax=jnp.float32(1e-20), **options))(x)
    for values in (np.asarray(q.values)[0, :6], np.asarray(q.values_t)[:6, 0]):
        np.testing.assert_array_equal(
            values.astype(np.float32), np.array([448, -448, np.nan, np.nan, np.nan, 0], np.float32)
        )
        assert np.signbit(values.astype(np.float32)[5])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_reference(scaling):
    """What reference.py says in jnp, and numpy here, is one thing."""
    x = make_x(SHAPE)
    values, scales = jax.jit(quantize_reference, static_argnums=(1, 2))(x, scaling, E4M3)
    want = np_quantize(x, Variant(scaling))
    np.testing.assert_array_equal(bits_of(values), bits_of(want["values"]))
    scales = scales if scaling == "block_128x128" else scales.T
    np.testing.assert_array_equal(bits_of(scales).reshape(want["scales"].shape), bits_of(want["scales"]))


@pytest.mark.parametrize(("scaling", "dtype"), list(zip(SCALINGS, (E4M3, E5M2, E4M3, E5M2), strict=True)))
def test_dequantize(scaling, dtype):
    """Half a step of what was there, from both layouts, in the dtype that was there."""
    x = jax.random.normal(jax.random.key(0), SHAPE).astype(jnp.bfloat16)
    q = compiled("xla", Variant(scaling, dtype=dtype))(x)
    half = 2.0**-4 if dtype == E4M3 else 2.0**-3
    dequantize = jax.jit(
        lambda q: (
            jaxops.dequantize(q),
            jaxops.dequantize(q.T).T,
            jaxops.dequantize(dataclasses.replace(q, values=None, scales=None)),
        )
    )
    for found in dequantize(q):
        assert found.dtype == jnp.bfloat16
        error = np.abs(np.asarray(found - x, np.float32))
        assert (error <= 1.02 * half * np.abs(np.asarray(x, np.float32)) + 2e-4).all()
        assert error.mean() > 0.1 * half * np.abs(np.asarray(x, np.float32)).mean()  # or it was not quantised
    assert jax.eval_shape(lambda q: jaxops.dequantize(q, jnp.float16), q).dtype == jnp.float16


@pytest.mark.gpu
@pytest.mark.parametrize("run", ["gpu", "gpu-xla"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_large(run, scaling):
    """Many tiles on every multiprocessor, and widths with and without 16-byte loads."""
    for shape, dtype in (
        ((4096, 3072), "bfloat16"),
        ((1000, 4090), "bfloat16"),
        ((513, 20_000), "bfloat16"),
        ((2048, 2048), "float32"),
    ):
        for layouts in ("row", "both"):
            variant = Variant(scaling, layouts)
            x = make_x(shape, dtype, seed=8)
            check(run, variant, x)
