"""Casts of rows read through indices and of two matrices side by side have the bits of a cast of the copy."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops._lib.ragged.offsets import padded_rows
from jaxops.ops.quantize import Plan, Tiles, quantize_beside, quantize_gathered
from tests.arrays import put
from tests.jaxprs import same_program
from tests.ops.quantize.cases import (
    E5M2,
    KERNELS,
    RUNS,
    SCALINGS,
    Variant,
    backend_of,
    bits_of,
    check_equal,
    make_x,
    np_quantize,
)
from tests.window import window

T, R, K, G = 61, 300, 133, 4
OFFSETS = {
    "unaligned": [0, 70, 201, 202, 300],
    "empty": [0, 0, 128, 128, 300],
    "outside": [17, 45, 45, 174, 290],
    "nothing": [9, 9, 9, 9, 9],
    "whole-blocks": [0, 128, 256, 256, 256],
}
RAGGED = SCALINGS[:3]
WILD = (-(2**31), -1, -T, T, T + 1, 2**31 - 1)


@functools.cache
def gathered(run: str, v: Variant):
    """A jitted function from x, indices, offsets and perhaps amax to a Quantized."""
    if backend_of(run) == "xla" and (v.tile or v.amax):
        return gathered(run, dataclasses.replace(v, tile=None, amax=None))
    how: dict[str, Any] = {"scaling": v.scaling, "dtype": v.dtype, "pow2_scales": v.pow2}
    how["plan"] = Plan(backend_of(run), cast=v.tile, amax=v.amax)
    return jax.jit(lambda x, indices, offsets, amax=None: quantize_gathered(x, indices, offsets, amax=amax, **how))


@functools.cache
def beside(run: str, v: Variant):
    """A jitted function from left, right and perhaps amax to a Quantized."""
    how: dict[str, Any] = {"scaling": v.scaling, "dtype": v.dtype, "layouts": v.layouts, "pow2_scales": v.pow2}
    how["plan"] = Plan(backend_of(run), cast=v.tile, amax=v.amax)
    return jax.jit(lambda left, right, amax=None: quantize_beside(left, right, amax=amax, **how))


def col(scaling: str, **change) -> Variant:
    return Variant(scaling, "col", ragged=True, **change)


def some_rows(x: jax.Array, offsets, seed: int = 0, R: int = R, outside=()) -> tuple[jax.Array, np.ndarray]:
    """x, whose tokens `outside` hold what would show anywhere, and indices: of those tokens for the rows outside all
    groups, wild ones among the others."""
    rng, x = np.random.default_rng(seed), np.array(x)
    T = x.shape[0]
    inside = np.setdiff1d(np.arange(T), outside)
    indices = rng.choice(inside, R).astype(np.int32)
    wild = rng.choice(R, min(R, 20), replace=False)
    indices[wild] = rng.choice(WILD if not set(outside) & {0, T - 1} else inside, len(wild))
    if len(outside):
        x[list(outside)] = np.resize([np.nan, np.inf, 1e30], (len(outside), 1))
        row = np.arange(R)
        out = (row < offsets[0]) | (row >= offsets[-1])
        indices[out] = rng.choice(outside, out.sum())
    return put(x), indices


def check_gathered(run: str, v: Variant, x, indices, offsets, amax=None) -> None:
    got = gathered(run, v)(x, indices, np.array(offsets, np.int32), None if amax is None else jnp.float32(amax))
    rows = np.asarray(x)[np.clip(indices, 0, x.shape[0] - 1)]
    check_equal(got, np_quantize(rows, v, offsets, amax), v, offsets)
    assert got.values_t.shape == (x.shape[1], padded_rows(len(indices), len(offsets) - 1))
    np.testing.assert_array_equal(got.group_offsets, offsets)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("scaling", RAGGED)
def test_gathered(run, scaling):
    """Rows outside the groups have the tokens with NaN, infinities, huge numbers: they are not read."""
    compilations = []
    for i, offsets in enumerate(OFFSETS.values()):
        x, indices = some_rows(make_x((T, K), seed=i), offsets, i, outside=(3, 20, 21, 40))
        check_gathered(run, col(scaling), x, indices, offsets)
        compilations.append(gathered(run, col(scaling))._cache_size())
    assert len(set(compilations[1:])) == 1  # new indices and offsets recompile nothing


SHAPES = [((1, 40), [0, 1]), ((5, 1), [0, 0, 2, 7]), ((263, 128), [3, 11, 13]), ((7, 257), [0, 127, 255, 256])]


# The programs of `test_tiles`. The pass that looks for rowwise magnitudes takes three tiles a row of K columns.
GATHER_TILE = Tiles(128, 64, 16, 4, 8, 2)
TILED = {s: col(s, tile=GATHER_TILE, amax=Tiles(16, 64) if s == "rowwise" else None) for s in RAGGED}


# One row, one token, fewer rows than tokens, columns of one tile and of two; blocks have no pass of their own for amax.
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("scaling", "shape", "offsets"),
    [
        *(("block_1x128", *each) for each in SHAPES[::3]),
        ("tensorwise", *SHAPES[3]),
        *(("rowwise", *each) for each in SHAPES[1:3]),
    ],
    ids=str,
)
def test_gathered_shapes(run, scaling, shape, offsets):
    R = offsets[-1] + (shape[0] == 263)
    indices = np.random.default_rng(5).integers(-1, shape[0] + 1, R).astype(np.int32)
    check_gathered(run, col(scaling), make_x(shape, seed=3), indices, offsets)


@pytest.mark.parametrize("run", RUNS)
def test_gathered_under_a_given_amax(run):
    """Larger numbers saturate, and no pass looks for them."""
    x, indices = some_rows(make_x((T, K), seed=4), OFFSETS["outside"])
    for amax in (0.5, 1e6):
        check_gathered(run, col("tensorwise"), x, indices, OFFSETS["outside"], amax)


@pytest.mark.parametrize("scaling", RAGGED)
def test_nothing_gathered(scaling):
    """No rows, no columns; no rows and no tokens."""
    for tokens, columns, rows in ((4, 5, 0), (4, 0, 3), (0, 5, 0)):
        given = np.ones((tokens, columns), np.float32), np.zeros(rows, np.int32), np.array([0, 0, rows], np.int32)
        assert same_program(*(gathered(run, col(scaling)) for run in ("xla", "interpret")), *given)
        q = gathered("xla", col(scaling))(*given)
        assert q.values_t.shape == (columns, padded_rows(rows, 2))
        assert np.isfinite(np.asarray(q.scales_t)).all()


@pytest.mark.parametrize("run", RUNS)
def test_broken_offsets_and_wild_indices_stay_in_bounds(run):
    """Wrong rows, but no access out of bounds: XLA would give NaN; tests/sanitize.py runs the kernels."""
    x = put(np.ones((T, K)), jnp.bfloat16)
    indices = np.random.default_rng(0).choice(WILD, R).astype(np.int32)
    for scaling in RAGGED:
        for offsets in ([-9, 50, 90, 120, 400], [250, 100, 299, 0, 300], [2**31 - 1, -(2**31), 7, 300, 5]):
            q = jax.block_until_ready(gathered(run, col(scaling))(x, indices, np.array(offsets, np.int32), None))
            assert q.values_t.shape == (K, padded_rows(R, G))
            if scaling != "block_1x128":
                assert np.isfinite(np.asarray(q.scales_t)).all()


# Tiles that hold columns of one matrix only, and of both; blocks of 128 columns of both; the border at a vector's end,
# and inside of one; unequal widths.
WIDTHS = [(128, 128), (136, 136), (133, 133), (40, 200), (256, 1)]
# Where the border lies is one code for every scaling.
BESIDE = [
    ("block_1x128", WIDTHS[0]),
    ("block_1x128", WIDTHS[3]),
    ("block_128x128", WIDTHS[1]),
    ("tensorwise", WIDTHS[4]),
    ("rowwise", WIDTHS[2]),
]


def check_beside(run: str, v: Variant, left, right, amax=None) -> None:
    got = beside(run, v)(left, right, None if amax is None else jnp.float32(amax))
    x = np.concatenate([left, right], axis=-1)
    for i in np.ndindex(x.shape[:-2]):
        check_equal(jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], got), np_quantize(x[i], v, amax=amax), v)
    assert (got.values if v.layouts != "col" else got.values_t).ndim == x.ndim


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("scaling", "widths"), BESIDE, ids=str)
def test_beside(run, scaling, widths):
    left, right = (make_x((150, width), seed=i) for i, width in enumerate(widths))
    check_beside(run, Variant(scaling), left, right)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("scaling", "layouts", "F"),
    [
        ("tensorwise", "both", 51),
        ("rowwise", "col", 128),
        ("block_1x128", "row", 136),
        ("block_1x128", "col", 51),
        ("block_128x128", "row", 128),
    ],
)
def test_stacks_beside(run, scaling, layouts, F):
    """Of matrices with other magnitudes: each has its own scales, of both halves together."""
    sizes = np.array([0.01, 30, 1], np.float32)[:, None, None]
    left, right = (make_x((3, 37, F), "float32", seed=i) * sizes for i in range(2))
    check_beside(run, Variant(scaling, layouts, dtype=E5M2, pow2=True), left, right)


@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize(
    "v",
    [
        Variant("block_1x128", "both", tile=Tiles(128, 128, 4, 8, 4, 1)),
        Variant("tensorwise", "row", tile=Tiles(32, 64, warps=2)),
        Variant("rowwise", "both", tile=Tiles(128, 64, 32, 2, 4, 2), amax=Tiles(16, 64)),
        Variant("rowwise", "row", tile=Tiles(8, 128, warps=1)),
    ],
    ids=lambda v: f"{v}-{v.tile.rows}x{v.tile.cols}",
)
def test_tiles(run, v):
    check_beside(run, v, make_x((150, 101), seed=1), make_x((150, 131), seed=2))
    if v.layouts == "both" or v.scaling == "tensorwise":
        x, indices = some_rows(make_x((T, K), seed=3), OFFSETS["outside"])
        check_gathered(run, TILED[v.scaling], x, indices, OFFSETS["outside"])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_nothing_beside(scaling):
    """A side without columns; neither with any; no rows."""
    some, none = make_x((6, 40), seed=1), np.zeros((6, 0), jnp.bfloat16)
    nothing = np.zeros((0, 40), jnp.bfloat16)
    for left, right in ((some, none), (none, some), (none, none), (nothing, nothing)):
        assert same_program(*(beside(run, Variant(scaling)) for run in ("xla", "interpret")), left, right)
    for left, right in ((some, none), (none, some)):
        check_beside("xla", Variant(scaling), left, right)
    assert beside("xla", Variant(scaling))(none, none).values_t.shape == (0, 6)
    assert beside("xla", Variant(scaling))(nothing, nothing).values.shape == (0, 80)


@pytest.mark.parametrize("run", KERNELS)
def test_more_than_int32_reaches(run):
    """Columns of values_t counted in int64; a batch one matrix after another."""
    x, indices = some_rows(make_x((40, 256), seed=4), [3, 20, 33], R=40)
    left, right = (make_x((2, 30, 140), seed=i) for i in range(2))
    gather, side = col("block_1x128"), Variant("block_1x128")
    mapped = jax.jit(jax.vmap(beside(run, side)))
    with window(100_000):
        check_gathered(run, gather, x, indices, [3, 20, 33])
    with window(5000):
        check_beside(run, side, left, right)
        found = mapped(left, right)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(beside("xla", side)(left, right)), strict=True):
        np.testing.assert_array_equal(bits_of(a), bits_of(b))


@pytest.mark.parametrize("call", ["gathered", "beside"])
def test_no_gradient(call):
    x, i = jnp.ones((3, 5)), jnp.zeros(4, jnp.int32)
    cast = {
        "gathered": lambda x: quantize_gathered(x, i, jnp.array([0, 4], jnp.int32)).scales_t.sum(),
        "beside": lambda x: quantize_beside(jnp.ones_like(x), x).scales.sum(),
    }[call]
    with pytest.raises(NotImplementedError, match=r"no gradient of its own.*stop_gradient"):
        jax.eval_shape(jax.grad(cast), x)
    jax.eval_shape(jax.grad(lambda x: cast(jax.lax.stop_gradient(x))), x)
