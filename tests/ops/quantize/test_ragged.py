"""Ragged groups: no scale of the column layout spans two, and their columns are padded to multiples of 128."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.ragged.offsets import padded_rows, padded_starts
from tests.arrays import put
from tests.ops.quantize.cases import RUNS, Variant, bits_of, check_equal, compiled, make_x, np_quantize

M, K, G = 300, 133, 4
OFFSETS = {
    "unaligned": [0, 70, 201, 202, 300],
    "empty": [0, 0, 128, 128, 300],
    "one": [0, 0, 0, 300, 300],
    "outside": [17, 45, 45, 174, 290],
    "nothing": [9, 9, 9, 9, 9],
    "whole-blocks": [0, 128, 256, 256, 256],
}
X = make_x((M, K), seed=1)
BLOCKS = Variant("block_1x128", "both", ragged=True, stochastic=True)
STARTS = jax.jit(padded_starts, static_argnums=1)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "variant",
    [
        BLOCKS,
        Variant("rowwise", "both", ragged=True),
        Variant("tensorwise", "both", ragged=True),
    ],
    ids=str,
)
def test_layouts(run, variant):
    """Rows outside the groups hold NaN, infinities, huge numbers: they affect no column, only their row's scale."""
    f = compiled(run, variant)
    compilations = []
    for offsets in OFFSETS.values():
        outside = np.r_[0 : offsets[0], offsets[-1] : M]
        x = np.array(X)
        for first, value in enumerate((np.nan, np.inf, 1e30)):  # the first two reach no scale anyway
            x[outside[first::3]] = value
        check_equal(f(x, np.array(offsets, np.int32)), np_quantize(x, variant, offsets), variant, offsets)
        compilations.append(f._cache_size())
    assert len(set(compilations[1:])) == 1  # new offsets recompile nothing


@pytest.mark.parametrize("run", RUNS)
def test_row_layout_is_that_without_groups(run):
    variant = Variant(layouts="row", ragged=True)
    got = compiled(run, variant)(X, jnp.array([3, 50, 299], jnp.int32))
    check_equal(got, np_quantize(X, variant), variant)
    assert got.group_offsets.shape == (3,)


@pytest.mark.parametrize("run", RUNS)
def test_broken_offsets_stay_in_bounds(run):
    """Wrong rows, but no access out of bounds: XLA would give NaN; tests/sanitize.py runs the kernels."""
    f = compiled(run, BLOCKS)
    for offsets in (
        [-9, 50, 90, 120, 400],
        [250, 100, 299, 0, 300],
        [2**31 - 1, -(2**31), 7, 300, 5],
        [0, 300, 0, 300, 0],
    ):
        got = f(X, jnp.array(offsets, jnp.int32))
        assert got.values_t.shape == (K, padded_rows(M, G))
        jax.block_until_ready(got)


@hypothesis.settings(max_examples=100)
@hypothesis.given(sizes=st.lists(st.integers(0, 300), min_size=7, max_size=7), before=st.integers(0, 200))
def test_padded_starts(sizes, before):
    """Every group at a multiple of 128, one behind the other, and all of them inside what padded_rows says."""
    rows, offsets = 2500, before + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    starts = np.asarray(STARTS(put(offsets, jnp.int32), rows))
    want = np.concatenate([[0], np.cumsum([-(-size // 128) * 128 for size in sizes])])
    np.testing.assert_array_equal(starts, want)
    assert starts[-1] <= padded_rows(rows, len(sizes))
    assert padded_rows(rows, len(sizes)) == 128 * (-(-rows // 128) + len(sizes))


def test_padded_starts_of_broken_offsets_are_in_bounds():
    for offsets in ([0, 300, 0, 300, 0], [-9, 50, 90, 120, 400], [2**31 - 1, -(2**31), 7, 300, 5]):
        starts = np.asarray(STARTS(jnp.array(offsets, jnp.int32), M))
        assert ((starts >= 0) & (starts <= padded_rows(M, G)) & (starts % 128 == 0)).all()


def test_dequantize_takes_the_row_layout():
    q = compiled("xla", BLOCKS)(X, jnp.array(OFFSETS["unaligned"], jnp.int32))
    dequantize = jax.jit(jaxops.dequantize)
    np.testing.assert_array_equal(
        bits_of(dequantize(q)),
        bits_of(dequantize(dataclasses.replace(q, values_t=None, scales_t=None, group_offsets=None))),
    )
    col = dataclasses.replace(q, values=None, scales=None)
    with pytest.raises(NotImplementedError, match=r"the number of rows.*layouts='row' or 'both'"):
        jaxops.dequantize(col)
    with pytest.raises(NotImplementedError, match=r"ragged groups has no transpose"):
        _ = q.T
