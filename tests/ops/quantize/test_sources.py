"""Casts of ragged rows, of rows read through indices, and of two tensors side by side.

No scale of the column layout spans two groups, and their columns are padded to multiples of 128.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.ragged.offsets import padded_rows
from jaxops.ops.quantize import Beside, Gathered, Tiles
from tests.arrays import put
from tests.jaxprs import same_program
from tests.ops.quantize.cases import (
    E5M2,
    KERNELS,
    OFFSETS,
    RUNS,
    SCALINGS,
    R,
    Variant,
    bits_of,
    check_equal,
    check_stack,
    compiled,
    make_x,
    np_quantize,
)
from tests.window import window

T, K, G = 61, 133, 4
BROKEN = ([-9, 50, 90, 120, 400], [250, 100, 299, 0, 300], [2**31 - 1, -(2**31), 7, 300, 5], [0, 300, 0, 300, 0])
WILD = (-(2**31), -1, -T, T, T + 1, 2**31 - 1)
RAGGED = [Variant(scaling, "both", ragged=True) for scaling in SCALINGS[:3]]
RAGGED[2] = dataclasses.replace(RAGGED[2], stochastic=True)
GATHERED = [Variant(scaling, "col", ragged=True) for scaling in SCALINGS[:3]]


def rows_of(v: Variant, offsets, tokens: int = T, K: int = K, seed: int = 0):
    """(a source of ragged rows, the rows). Rows outside the groups hold NaN, infinities and huge numbers. Gathered
    rows come from some tokens; some indices are wild, and count as the nearest ones."""
    rng, count = np.random.default_rng(seed), R if tokens == T else max(offsets[-1], 1)
    outside = np.r_[0 : offsets[0], offsets[-1] : count]
    bad = np.resize(np.array([np.nan, np.inf, 1e30]), len(outside))[:, None]
    if v.layouts != "col":
        x = np.array(make_x((count, K), seed=1))
        x[outside] = bad
        return put(x), x
    x = np.array(make_x((tokens, K), seed=seed))
    indices = rng.integers(1, max(2, tokens - 3), count)
    wild = rng.choice(count, min(count, 20), replace=False)
    indices[wild] = rng.choice(WILD, len(wild))
    if tokens > 20:
        x[[3, 20]] = np.array([[np.nan], [1e30]])
        indices[np.isin(indices, (3, 20))] = 5
        indices[outside] = np.resize(np.array([3, 20]), len(outside))
    indices = indices.astype(np.int32)
    return Gathered(put(x), put(indices)), x[np.clip(indices, 0, tokens - 1)]


def check_rows(run: str, v: Variant, offsets, amax=None, **sizes) -> None:
    source, rows = rows_of(v, offsets, **sizes)
    given = None if amax is None else jnp.float32(amax)
    got = compiled(run, v)(source, put(np.array(offsets, np.int32)), given)
    check_equal(got, np_quantize(rows, v, offsets, amax), v, offsets)
    assert got.values_t.shape == (rows.shape[1], padded_rows(len(rows), len(offsets) - 1))
    np.testing.assert_array_equal(got.group_offsets, offsets)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("v", RAGGED + GATHERED, ids=str)
def test_groups(run, v):
    """What rows outside the groups hold affects no column, only their own row's scale."""
    compilations = []
    for seed, offsets in enumerate(OFFSETS.values()):
        check_rows(run, v, offsets, seed=seed)
        compilations.append(compiled(run, v)._cache_size())
    assert len(set(compilations[1:])) == 1  # new offsets and indices recompile nothing


@pytest.mark.parametrize("run", RUNS)
def test_row_layout_is_that_without_groups(run):
    v, x = Variant(layouts="row", ragged=True), make_x((R, K), seed=1)
    got = compiled(run, v)(x, jnp.array([3, 50, 299], jnp.int32))
    check_equal(got, np_quantize(x, v), v)
    assert got.group_offsets.shape == (3,)


# One row, one token, fewer rows than tokens, columns of one tile and of two.
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("v", "sizes", "offsets"),
    [
        (GATHERED[2], (1, 40), [0, 1]),
        (GATHERED[1], (5, 1), [0, 0, 2, 7]),
        (GATHERED[1], (263, 128), [3, 11, 13]),
        (GATHERED[0], (7, 257), [0, 127, 255, 256]),
    ],
    ids=str,
)
def test_gathered_sizes(run, v, sizes, offsets):
    check_rows(run, v, offsets, tokens=sizes[0], K=sizes[1])


@pytest.mark.parametrize("run", RUNS)
def test_gathered_under_a_given_amax(run):
    """Larger numbers saturate, and no pass looks for them."""
    for amax in (0.5, 1e6):
        check_rows(run, GATHERED[0], OFFSETS["outside"], amax)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("v", RAGGED[2:] + GATHERED, ids=str)
def test_broken_offsets_and_wild_indices_stay_in_bounds(run, v):
    """Wrong rows, but no access out of bounds: XLA would give NaN; tests/sanitize.py runs the kernels."""
    indices = np.random.default_rng(0).choice(WILD, R).astype(np.int32)
    ones = put(np.ones((R if v.layouts == "both" else T, K)), jnp.bfloat16)
    source = ones if v.layouts == "both" else Gathered(ones, put(indices))
    for offsets in BROKEN:
        q = jax.block_until_ready(compiled(run, v)(source, put(np.array(offsets, np.int32))))
        assert q.values_t.shape == (K, padded_rows(R, G))
        if v.scaling != "block_1x128":
            assert np.isfinite(np.asarray(q.scales_t)).all()


def test_dequantize_takes_the_row_layout():
    q = compiled("xla", RAGGED[2])(make_x((R, K), seed=1), jnp.array(OFFSETS["unaligned"], jnp.int32))
    dequantize, row = jax.jit(jaxops.dequantize), dataclasses.replace(q, values_t=None, scales_t=None)
    expected = dequantize(dataclasses.replace(row, group_offsets=None))
    np.testing.assert_array_equal(bits_of(dequantize(q)), bits_of(expected))
    with pytest.raises(NotImplementedError, match=r"the number of rows.*layouts='row' or 'both'"):
        jaxops.dequantize(dataclasses.replace(q, values=None, scales=None))
    with pytest.raises(NotImplementedError, match=r"ragged groups has no transpose"):
        _ = q.T


# Tiles that hold columns of one tensor only, and of both; blocks of 128 columns of both; the border at a vector's end,
# and inside of one; unequal widths. Where the border lies is one code for every scaling.
STACKED = {"dtype": E5M2, "pow2": True}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("v", "widths"),
    [
        (Variant("block_1x128"), (128, 128)),
        (Variant("block_1x128"), (40, 200)),
        (Variant("block_128x128"), (136, 136)),
        (Variant("tensorwise"), (256, 1)),
        (Variant("rowwise"), (133, 133)),
        (Variant("tensorwise", "both", **STACKED), (51, 51)),
        (Variant("rowwise", "col", **STACKED), (128, 128)),
        (Variant("block_1x128", "row", **STACKED), (136, 136)),
        (Variant("block_1x128", "col", **STACKED), (51, 51)),
        (Variant("block_128x128", "row", **STACKED), (128, 128)),
    ],
    ids=str,
)
def test_beside(run, v, widths):
    """Of matrices, and of stacks whose matrices have other magnitudes: each has its own scales, of both halves."""
    left, right = (make_x((150, width), seed=i) for i, width in enumerate(widths))
    if not v.pow2:
        check_equal(compiled(run, v)(Beside(left, right)), np_quantize(np.concatenate([left, right], axis=1), v), v)
        return
    sizes = np.array([0.01, 30, 1], np.float32)[:, None, None]
    left, right = (x[None, :37].astype(jnp.float32) * sizes for x in (left, right))
    check_stack(compiled(run, v)(Beside(left, right)), np.concatenate([left, right], axis=-1), v)


@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize("v", GATHERED, ids=str)
def test_tiles_of_gathered_rows(run, v):
    tiles = {"tile": Tiles(128, 64, 16, 4, 8, 2), "amax": Tiles(16, 64)}
    check_rows(run, dataclasses.replace(v, **tiles), OFFSETS["outside"], seed=3)


@pytest.mark.parametrize("run", KERNELS)
def test_tiles_of_tensors_beside(run):
    v = Variant("rowwise", "both", tile=Tiles(128, 64, 32, 2, 4, 2), amax=Tiles(16, 64))
    left, right = make_x((150, 101), seed=1), make_x((150, 131), seed=2)
    check_equal(compiled(run, v)(Beside(left, right)), np_quantize(np.concatenate([left, right], axis=1), v), v)


@pytest.mark.parametrize("run", KERNELS)
def test_more_than_int32_reaches(run):
    """Columns of values_t counted in int64; a batch one matrix after another."""
    beside, v = Beside(*(make_x((2, 30, 140), seed=i) for i in range(2))), Variant("block_1x128")
    mapped = jax.jit(jax.vmap(compiled(run, v)))
    with window(100_000):
        check_rows(run, dataclasses.replace(GATHERED[2], pow2=True), OFFSETS["outside"])
    with window(5000):
        found = mapped(beside)
    check_stack(found, np.concatenate(beside, axis=-1), v)


@pytest.mark.parametrize("v", [GATHERED[0], GATHERED[1], GATHERED[2], *map(Variant, SCALINGS)], ids=str)
def test_nothing(v):
    """No rows, no columns, no tokens; a side without columns, and neither with any: by XLA."""
    if v.ragged:
        sizes = ((4, 5, 0), (4, 0, 3), (0, 5, 0))
        empty = [(Gathered(np.ones((T, K), np.float32), np.zeros(R, np.int32)), R) for T, K, R in sizes]
        sources = [(source, np.array([0, 0, R], np.int32)) for source, R in empty]
    else:
        some, none = np.ones((6, 40), np.float32), np.zeros((6, 0), np.float32)
        pairs = ((some, none), (none, some), (none, none), (some[:0], some[:0]))
        sources = [(Beside(*pair), None) for pair in pairs]
    for source, offsets in sources:
        assert same_program(*(compiled(run, v) for run in ("xla", "interpret")), source, offsets)
        for name, scales in vars(compiled("xla", v)(source, offsets)).items():
            assert not name.startswith("scales") or scales is None or np.isfinite(np.asarray(scales)).all()
