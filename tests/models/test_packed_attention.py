"""Attention over packed sequences against attention over one sequence at a time."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.packed_attention import packed_attention, sequences_by_row
from tests.compare import assert_close

T, HEADS, KV_HEADS, DIM, B, LONGEST = 21, 4, 2, 4, 5, 6


@functools.partial(jax.jit, static_argnames="causal")
def both_ways(q, k, v, offsets, causal):
    with jax.default_matmul_precision("highest"):
        dense = packed_attention(q, k, v, offsets, causal=causal)
        return dense, packed_attention(q, k, v, offsets, causal=causal, way="banded", longest=LONGEST)


by_row = jax.jit(sequences_by_row, static_argnums=(1, 2, 3))


def normal(seed: int, rows: int = T, dim: int = DIM) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(rows, heads, dim)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def one_at_a_time(q, k, v, offsets, causal) -> np.ndarray:
    out = np.zeros(q.shape)
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1).astype(np.float64) for x in (k, v))
    for start, end in itertools.pairwise(offsets):
        score = np.einsum("qhd,khd->hqk", q[start:end].astype(np.float64), k[start:end]) / np.sqrt(q.shape[2])
        weight = np.exp(score) * (np.tri(end - start) if causal else 1)
        out[start:end] = np.einsum("hqk,khd->qhd", weight / weight.sum(axis=-1, keepdims=True), v[start:end])
    return out


@given(st.booleans(), st.integers(0, 3), st.lists(st.integers(0, LONGEST), min_size=B, max_size=B), st.integers(0, 5))
def test_values(causal, before, lengths, seed):
    ends = np.minimum(np.cumsum([before, *lengths]), T)
    q, k, v = normal(seed)
    wanted = one_at_a_time(q, k, v, ends, causal)
    outside = np.r_[0 : ends[0], ends[-1] : T]
    for x in (q, k, v):
        x[outside] = np.nan
    for got in both_ways(q, k, v, jnp.asarray(ends, jnp.int32), causal):
        assert_close(got, wanted, "float32")


def gradients(q, k, v, offsets, **way):
    def loss(q, k, v):
        return jnp.sum(jnp.sin(packed_attention(q, k, v, offsets, **way).astype(jnp.float32)))

    with jax.default_matmul_precision("highest"):
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)


def test_gradients_agree_and_stay_inside():
    q, k, v = normal(0)
    offsets = jnp.array([2, 8, 8, 11, 17, 19], jnp.int32)
    dense, banded = (gradients(q, k, v, offsets, way=way, longest=LONGEST) for way in ("dense", "banded"))
    for one, other in zip(dense, banded, strict=True):
        assert_close(one, other, "float32")
        assert not np.asarray(one)[np.r_[0:2, 19:21]].any()


@given(st.lists(st.integers(0, 30), min_size=7, max_size=7), st.integers(0, 3))
def test_sequences_by_row(lengths, before):
    """Row by row, from the left, nonempty sequences only, as cuDNN needs them; missing or long ones are reported."""
    rows, longest, crowd = 4, 10, 3
    offsets = np.minimum(np.cumsum([before, *lengths]), rows * longest).astype(np.int32)
    wanted = [
        [
            (start % longest, end - start)
            for start, end in itertools.pairwise(offsets)
            if end > start and start // longest == row
        ]
        for row in range(rows)
    ]
    starts, kept, fits = (np.asarray(x) for x in by_row(jnp.asarray(offsets), rows, longest, crowd))
    assert fits == all(len(some) <= crowd and all(length <= longest for _, length in some) for some in wanted)
    if fits:
        assert [
            [(s, n) for s, n in zip(*both, strict=False) if n >= 0]
            for both in zip(starts.tolist(), kept.tolist(), strict=True)
        ] == wanted
        assert all(sorted(row, key=lambda n: n < 0) == row for row in kept.tolist())
        np.testing.assert_array_equal(starts[:, :-1] < 0, kept < 0)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "offsets", [[0, 700, 700, 701, 1000], [3, 250, 250, 250, 990], [0, 1000]], ids=["whole", "outside", "one"]
)
def test_cudnn(offsets, causal):
    """Values and gradients equal those of the dense way; NaN outside the sequences has no effect."""
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in normal(0, 1000, 64)]
    ends = jnp.asarray(offsets, jnp.int32)
    dense = packed_attention(*arrays, ends, causal=causal), *gradients(*arrays, ends, causal=causal)
    spoilt = [x.at[: offsets[0]].set(jnp.nan).at[offsets[-1] :].set(jnp.nan) for x in arrays]
    for limits in ({}, {"longest": max(np.diff(offsets)), "crowd": 4}):
        found = [
            attend(*spoilt, ends, causal=causal, way="cudnn", **limits) for attend in (packed_attention, gradients)
        ]
        for got, want in zip((found[0], *found[1]), dense, strict=True):
            assert_close(got, want, "bfloat16", scale=4)  # the probabilities are bfloat16, too


@pytest.mark.gpu
@pytest.mark.parametrize("limits", [{"longest": 100}, {"longest": 500, "crowd": 2}], ids=["longer", "more"])
def test_cudnn_of_more_than_was_said(limits):
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in normal(0, 1000, 64)]
    out = packed_attention(*arrays, jnp.array([0, 10, 20, 30, 1000], jnp.int32), way="cudnn", **limits)
    assert np.isnan(np.asarray(out, np.float32)).all()


def test_bad_arguments():
    q, k, v = normal(0)
    with pytest.raises(ValueError, match="must be one of 'dense', 'banded', 'cudnn'"):
        packed_attention(q, k, v, jnp.array([0, T]), way="flash")
    with pytest.raises(ValueError, match="needs longest"):
        packed_attention(q, k, v, jnp.array([0, T]), way="banded")
    with pytest.raises(ValueError, match="has no float32"):
        packed_attention(q, k, v, jnp.array([0, T]), way="cudnn")
