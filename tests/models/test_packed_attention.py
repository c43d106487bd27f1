"""Attention over packed sequences against attention over one sequence at a time."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.packed_attention import packed_attention
from tests.compare import assert_close

T, HEADS, DIM, B, LONGEST = 21, 2, 4, 5, 6


@jax.jit
def both_ways(q, k, v, offsets):
    with jax.default_matmul_precision("highest"):
        return packed_attention(q, k, v, offsets), packed_attention(q, k, v, offsets, way="banded", longest=LONGEST)


def normal(seed: int) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).normal(size=(3, T, HEADS, DIM)).astype(np.float32))


def one_at_a_time(q, k, v, offsets) -> np.ndarray:
    out = np.zeros(q.shape)
    for start, end in itertools.pairwise(offsets):
        score = np.einsum("qhd,khd->hqk", *(x[start:end].astype(np.float64) for x in (q, k))) / np.sqrt(DIM)
        weight = np.exp(score)
        out[start:end] = np.einsum("hqk,khd->qhd", weight / weight.sum(axis=-1, keepdims=True), v[start:end].astype(np.float64))
    return out


@given(st.integers(0, 3), st.lists(st.integers(0, LONGEST), min_size=B, max_size=B), st.integers(0, 5))
def test_values(before, lengths, seed):
    ends = np.minimum(np.cumsum([before, *lengths]), T)
    q, k, v = normal(seed)
    wanted = one_at_a_time(q, k, v, ends)
    outside = np.r_[0 : ends[0], ends[-1] : T]
    for x in (q, k, v):
        x[outside] = np.nan
    for got in both_ways(q, k, v, jnp.asarray(ends, jnp.int32)):
        assert_close(got, wanted, "float32")


def test_gradients_agree_and_stay_inside():
    q, k, v = normal(0)
    offsets = jnp.array([2, 8, 8, 11, 17, 19], jnp.int32)
    loss = lambda way: lambda q, k, v: jnp.sum(jnp.sin(packed_attention(q, k, v, offsets, way=way, longest=LONGEST)))
    with jax.default_matmul_precision("highest"):
        dense, banded = (jax.jit(jax.grad(loss(way), argnums=(0, 1, 2)))(q, k, v) for way in ("dense", "banded"))
    for one, other in zip(dense, banded, strict=True):
        assert_close(one, other, "float32")
        assert not np.asarray(one)[np.r_[0:2, 19:21]].any()


def test_bad_arguments():
    q, k, v = normal(0)
    with pytest.raises(ValueError, match="must be 'dense' or 'banded'"):
        packed_attention(q, k, v, jnp.array([0, T]), way="flash")
    with pytest.raises(ValueError, match="needs longest"):
        packed_attention(q, k, v, jnp.array([0, T]), way="banded")
