"""Attention over packed sequences: every way against float64 arithmetic sequence by sequence, and what no row sees."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxops
from jaxops.ops.packed_attention import Plan
from jaxops.ops.packed_attention.reference import packed_attention_reference
from jaxops.ops.packed_attention.visible import blocks_that_see, visible_rows
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.packed_attention.cases import (
    DIM,
    EXACT,
    HEADS,
    KV_HEADS,
    LONGEST,
    PLANS,
    B,
    S,
    T,
    arrays,
    ends_of,
    jit,
    sinks_of,
    with_gradients,
)

MASKS = {
    "whole": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "causal-window": {"causal": True, "window": 3},
    "until": {},
    "until-window": {"window": 3},
}
packings = st.tuples(st.integers(0, 3), st.lists(st.integers(0, LONGEST), min_size=B, max_size=B))


def seen(ends, key_ends, until, mask, window: int | None, keys: int) -> np.ndarray:
    """Bool [T, keys]: whether a row sees a key, pair by pair."""
    found = np.zeros((len(until), keys), bool)
    for (start, end), (key_start, key_end) in zip(
        itertools.pairwise(ends.tolist()), itertools.pairwise(key_ends.tolist()), strict=True
    ):
        for row, key in itertools.product(range(start, end), range(key_start, key_end)):
            own = key_end - (end - row)
            found[row, key] = not (
                (mask.startswith("causal") and key > own)
                or (mask.startswith("until") and key >= until[row])
                or (window is not None and key < own - window)
                or (mask == "window" and key > own + window)
            )
    return found


def one_at_a_time(q, k, v, sees, sinks=None, soft_cap: float | None = None) -> np.ndarray:
    """In float64, as a loop over rows."""
    out = np.zeros((*q.shape[:2], v.shape[2]))
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1).astype(np.float64) for x in (k, v))
    for row in np.flatnonzero(sees.any(axis=1)):
        keys = np.flatnonzero(sees[row])
        score = np.einsum("hd,khd->hk", q[row].astype(np.float64), k[keys]) / np.sqrt(q.shape[2])
        score = score if soft_cap is None else soft_cap * np.tanh(score / soft_cap)
        lost = np.full((len(score), 1), -np.inf) if sinks is None else sinks.astype(np.float64)[:, None]
        score = np.concatenate([score, lost], axis=1)
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        out[row] = np.einsum("hk,khd->hd", (weight / weight.sum(axis=1, keepdims=True))[:, :-1], v[keys])
    return out


def until_of(seed: int, keys: int) -> np.ndarray:
    """Some far outside of the keys."""
    rng = np.random.default_rng(seed)
    far = rng.choice([-(2**31), 2**31 - 1], T)
    return np.where(rng.random(T) < 0.2, far, rng.integers(-3, keys + 4, T)).astype(np.int32)


@pytest.mark.parametrize("cross", [False, True], ids=["own", "cross"])
@pytest.mark.parametrize("mask", [*MASKS])
@given(packings, packings, st.integers(0, 5))
def test_runs_of_keys(mask, cross, packing, key_packing, seed):
    """`visible_rows` is all that a way knows of a mask: for every mask and value the keys of a row's own sequence,
    pair by pair, and of no other one."""
    keys = S if cross else T
    ends, key_ends = ends_of(*packing, T), ends_of(*(key_packing if cross else packing), keys)
    until = until_of(seed, keys)
    for window in (MASKS[mask].get("window"), 2**31 - 1) if "window" in mask else (None,):
        found = visible_rows(
            ends, key_ends if cross else None, until if mask.startswith("until") else None,
            T=T, S=keys, causal=mask.startswith("causal"), window=window,
        )  # fmt: skip
        first, end, inside = map(np.asarray, found)
        key = np.arange(keys)[None, :]
        want = seen(ends, key_ends, until, mask, window, keys)
        np.testing.assert_array_equal((first[:, None] <= key) & (key < end[:, None]), want)
        np.testing.assert_array_equal(inside, [ends[0], ends[-1], key_ends[0], key_ends[-1]])


@functools.partial(jax.jit, static_argnames=("mask", "cross", "soft_cap"))
def every_way(operands, offsets, kv_offsets, until, *, mask, cross, soft_cap=None):
    """operands: q, k, v, sinks if there are some, and dout."""
    names = ("q", "k", "v", "sinks")
    with_options = lambda op, how: lambda *x: op(sequence_offsets=offsets, **dict(zip(names, x, strict=False)), **how)
    how = {"soft_cap": soft_cap} | MASKS[mask] | ({"visible_until": until} if mask.startswith("until") else {})
    how |= {"kv_offsets": kv_offsets} if cross else {}
    found = {"reference": with_gradients(with_options(packed_attention_reference, how), *operands)}
    for way, plan in PLANS.items():
        call = with_options(jaxops.packed_attention, how | {"longest": LONGEST, "plan": plan} | EXACT)
        found[way] = with_gradients(call, *operands)
    return found


def check_every_way(mask, cross, packing, key_packing, seed, values=None, sinks=None, soft_cap=None) -> None:
    q, k, v, dout = arrays(seed, T, S if cross else T, values=values)
    ends, key_ends = ends_of(*packing, T), ends_of(*(key_packing if cross else packing), k.shape[0])
    until = until_of(seed, k.shape[0])
    sees = seen(ends, key_ends, until, mask, MASKS[mask].get("window"), k.shape[0])
    wanted = one_at_a_time(q, k, v, sees, sinks, soft_cap)
    outside, keys_outside = (np.r_[0 : e[0], e[-1] : n] for e, n in ((ends, T), (key_ends, k.shape[0])))
    for x, rows in ((q, outside), (dout, outside), (k, keys_outside), (v, keys_outside)):
        x[rows] = np.nan
    operands = [x for x in (q, k, v, sinks, dout) if x is not None]
    found = every_way(operands, ends, key_ends, until, mask=mask, cross=cross, soft_cap=soft_cap)
    for way, results in found.items():
        assert_close(results[0], wanted, "float32", name=way)
        for name, got, want in zip("qkvs", results[1:], found["reference"][1:], strict=False):
            assert_close(got, want, "float32", scale=2, name=f"{way} d{name}")
            assert name == "s" or not np.asarray(got)[outside if name == "q" else keys_outside].any()


# Runs over whole sequences, that begin and end anywhere, and of other keys.
@pytest.mark.parametrize("mask", ["whole", "causal-window", "until"])
@settings(max_examples=8)
@given(packings, st.integers(0, 5))
def test_values_and_gradients(mask, packing, seed):
    check_every_way(mask, False, packing, packing, seed)


@settings(max_examples=8)
@given(packings, packings, st.integers(0, 5))
def test_keys_of_other_rows(packing, key_packing, seed):
    check_every_way("until-window", True, packing, key_packing, seed)


@pytest.mark.parametrize("mask", ["causal", "window", "until-window"])
@settings(max_examples=4)
@given(packings, st.integers(0, 5))
def test_sinks_cap_and_narrow_values(mask, packing, seed):
    check_every_way(mask, False, packing, packing, seed, values=3, sinks=sinks_of(seed), soft_cap=1.5)


def test_a_sink_that_takes_nothing():
    """-inf is as no sink; with a sink that takes all, nothing is left."""
    q, k, v, _ = arrays(0)
    ends = np.array([2, 9, 30], np.int32)
    sinks = np.array([-np.inf, -np.inf, 1e6, 1e30], np.float32)

    @jax.jit
    def every(q, k, v, sinks):
        call = functools.partial(jaxops.packed_attention, q, k, v, ends, causal=True, **EXACT)
        return [(call(sinks=sinks, plan=plan), call(plan=plan)) for plan in PLANS.values()]

    for with_some, without in every(q, k, v, sinks):
        assert_close(with_some[:, :2], without[:, :2], "float32")
        assert not with_some[:, 2:].any()


@pytest.mark.parametrize("way", PLANS)
def test_no_row_sees_another_sequence(way):
    """Not by any value of visible_until or of offsets that are no offsets: other sequences' rows change no bit, and get
    no gradient. (Documents that share a row and attend to each other are MaxText's issue 4476.)"""
    ends, mine = np.array([2, 9, 9, 20, 35], np.int32), slice(9, 20)
    others = np.r_[0:9, 20:T]
    q, k, v, dout = arrays(0)
    apart = [np.where(np.isin(np.arange(T), others)[:, None, None], -3 * x + 1, x) for x in (q, k, v)]
    masked = np.where(np.isin(np.arange(T), others)[:, None, None], 0, dout).astype(np.float32)
    call = jax.jit(
        lambda q, k, v, ends, until: with_gradients(
            lambda *x: jaxops.packed_attention(*x, ends, longest=LONGEST, plan=PLANS[way], visible_until=until),
            q, k, v, masked,
        )
    )  # fmt: skip
    far = np.full(T, 2**31 - 1, np.int32)
    for until in (far, -far, until_of(0, T)):
        one, other = call(q, k, v, ends, until), call(*apart, ends, until)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(np.asarray(a)[mine], np.asarray(b)[mine])
        assert not any(np.asarray(gradient)[others].any() for gradient in other[1:])
    assert not np.asarray(call(q, k, v, ends, -far)[0]).any()


@functools.cache
def at_offsets(way):
    call = lambda offsets, *x: jaxops.packed_attention(*x, offsets, causal=True, plan=PLANS[way], **EXACT)
    return jit(lambda q, k, v, dout, offsets: with_gradients(functools.partial(call, offsets), q, k, v, dout))


@pytest.mark.parametrize("way", PLANS)
@pytest.mark.parametrize(
    "bad", [[5, 3, 40, -7, 2**31 - 1], [-(2**31), 2**31 - 1, 0, 9, 4], [50, 60, 70, 80, 90]], ids=["a", "b", "c"]
)
def test_bad_offsets_stay_in_bounds(way, bad):
    """Any row may come out, finite: nothing is read outside of the arrays. (The interpreter pads with NaN.)"""
    q, k, v, dout = arrays(0)
    bad = np.array(bad, np.int32)
    first, end, inside = visible_rows(bad, None, None, T=T, S=T, causal=True, window=None)
    assert (np.asarray(first) >= 0).all()
    assert (np.asarray(end) <= T).all()
    assert ((np.asarray(inside) >= 0) & (np.asarray(inside) <= T)).all()
    found = at_offsets(way)(q, k, v, dout, bad)
    assert all(np.isfinite(np.asarray(x)).all() for x in found)


@given(packings, st.integers(0, 5), st.booleans(), st.sampled_from([4, 16]), st.sampled_from([4, 16]))
def test_blocks_that_see(packing, seed, whole, bq, bk):
    """Each pair that counts is in a block of the list; without a mask by row, no other block is in it."""
    until = None if whole else np.random.default_rng(seed).integers(0, T + 1, T).astype(np.int32)
    window = None if whole else 4
    first, end, _ = visible_rows(ends_of(*packing, T), None, until, T=T, S=T, causal=False, window=window)
    start, stop = np.asarray(blocks_that_see(first, end, S=T, bq=bq, bk=bk))
    sees = (np.asarray(first)[:, None] <= np.arange(T)) & (np.arange(T) < np.asarray(end)[:, None])
    for j in range(-(-T // bk)):
        rows = np.flatnonzero(sees[:, j * bk : (j + 1) * bk].any(axis=1)) // bq
        least, most = (rows.min(), rows.max() + 1) if len(rows) else (0, 0)
        assert (start[j] <= least and most <= stop[j]) or not len(rows)
        assert not whole or (start[j], stop[j]) == (least, most)


def test_16_bit():
    """Of rows that are longer than a block, with scores far from 0, in the ways' own sums of float32."""
    q, k, v, dout = (put(x, jnp.bfloat16) for x in arrays(1, dim=12))
    how = {"sequence_offsets": np.array([0, 30, T], np.int32), "causal": True, "scale": 1.5}

    @jit
    def run(q, k, v, dout):
        wide = [x.astype(jnp.float32) for x in (q, k, v, dout)]
        op = functools.partial(jaxops.packed_attention, longest=30, **how)
        ways = [with_gradients(functools.partial(op, plan=plan), q, k, v, dout) for plan in PLANS.values()]
        return with_gradients(lambda *x: packed_attention_reference(*x, **how), *wide), ways

    want, ways = run(q, k, v, dout)
    for way, got in zip(PLANS, ways, strict=True):
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert a.dtype == jnp.bfloat16
            assert_close(a, b, "bfloat16", scale=4, name=f"{way} {name}")  # the probabilities are rounded, too


ENDS = np.array([2, 6, 12, 20, 20, 30], np.int32)
LARGE = slice(6, 12)  # the sequence with large scores; the others have ordinary ones


@pytest.mark.parametrize("size", [6e5, 4e6, 1e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores(sign, size):
    """The output is right, and gradients are right or NaN, never wrong numbers."""
    q, k, v, dout = arrays(0)
    q[LARGE], k[LARGE] = 0, 0
    q[LARGE, :, 0], k[LARGE, :, 0] = 2, sign * size * np.array([1, 1.25, 1, 1.5, 1.125, 1])[:, None]  # scores are k's
    until = np.zeros(T, np.int32)
    wanted = one_at_a_time(q, k, v, seen(ENDS, ENDS, until, "whole", None, T))
    found = every_way([q, k, v, dout], ENDS, ENDS, until, mask="whole", cross=False)
    reference = found.pop("reference")
    assert set(found) == set(PLANS)
    for way, (out, *gradients) in found.items():
        assert_close(out, wanted, "float32", name=way)
        for name, got, want in zip("qkv", map(np.array, gradients), map(np.array, reference[1:]), strict=True):
            if size > 2**20:
                assert np.isnan(got[LARGE]).all(), (way, name)
            elif name == "v":  # scores are an eighth apart, exponentials off by 6 % at most
                np.testing.assert_allclose(got[LARGE], want[LARGE], atol=0.07 * np.abs(dout[LARGE]).sum())
            got[LARGE] = want[LARGE] = 0
            assert_close(got, want, "float32", scale=2, name=f"{way} d{name}")


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [DIM, 64, 128])
def test_kernels(mask, dim):
    """On a GPU: the plan that a user gets, of 16-bit numbers, against the portable backend in float32."""
    rows = 1000
    q, k, v, dout = (put(x, jnp.bfloat16) for x in arrays(0, rows, dim=dim))
    ends = jnp.array([3, 250, 250, 700, 701, 990], jnp.int32)
    until = put(np.random.default_rng(0).integers(0, rows, rows), jnp.int32)
    how = MASKS[mask] | ({"visible_until": until} if mask.startswith("until") else {})
    wide = [x.astype(jnp.float32) for x in (q, k, v, dout)]
    want = with_gradients(lambda *x: jaxops.packed_attention(*x, ends, plan=PLANS["xla"], **how, **EXACT), *wide)
    spoilt = [x.at[: ends[0]].set(jnp.nan).at[ends[-1] :].set(jnp.nan) for x in (q, k, v, dout)]
    call = lambda *x: jaxops.packed_attention(*x, ends, plan=Plan("pallas"), **how)
    first, second = (jax.jit(functools.partial(with_gradients, call))(*spoilt) for _ in range(2))
    for a, b, c in zip(first, second, want, strict=True):
        assert (a == b).all(), "two runs differ"
        assert_close(a, c, "bfloat16", scale=4)
