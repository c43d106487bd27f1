"""The Hopper kernel's values: in the simulator, and on a Hopper GPU."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops.packed_attention import Plan, Problem, Tiles, make_plan
from jaxops.ops.packed_attention.visible import query_blocks
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.packed_attention.cases import H200, arrays, sinks_of, with_gradients
from tests.ops.packed_attention.test_values import MASKS, one_at_a_time, seen

# Rows, of queries and keys, and where sequences end. Sequences end within tiles of keys and blocks of queries and at
# their ends, some are empty or one row, and there are rows outside.
PACKINGS = {
    "unequal": (307, 307, [3, 128, 128, 129, 258, 301], None),
    "one": (193, 193, [0, 193], None),
    "one-row": (1, 1, [0, 1], None),
    "outside": (131, 131, [70, 70, 70], None),
    "cross": (200, 331, [5, 70, 70, 71, 197], [7, 130, 140, 140, 329]),
}
NARROW, WIDE = Tiles(128, 64, 8, 2), Tiles(128, 128, 8, 1)


def until_of(rows: int, keys: int) -> np.ndarray:
    """Some far outside of the keys."""
    rng = np.random.default_rng(rows)
    far = rng.choice([-(2**31), 2**31 - 1], rows)
    return np.where(rng.random(rows) < 0.1, far, rng.integers(-3, keys + 4, rows)).astype(np.int32)


def check(packing: str, mask: str, tiles: Tiles, dim: int = 16, dtype: str = "bfloat16", **more) -> None:
    """The result and the gradients, which show the saved logarithms."""
    T, S, ends, key_ends = PACKINGS[packing]
    q, k, v, dout = (x.astype(dtype) for x in arrays(T, T, S, dim, more.pop("values", None)))
    sinks, soft_cap = more.pop("sinks", None), more.get("soft_cap")
    until, window = until_of(T, S), 70 if "window" in mask else None
    how = MASKS[mask] | ({"visible_until": put(until)} if mask.startswith("until") else {})
    how |= {} if window is None else {"window": window}
    how |= {} if key_ends is None else {"kv_offsets": put(key_ends, jnp.int32)}
    ends, key_ends = np.array(ends), np.array(ends if key_ends is None else key_ends)
    sees = seen(ends, key_ends, until, mask, window, S)
    factor = more.get("scale", dim**-0.5) * dim**0.5
    wanted = one_at_a_time(q.astype(np.float32) * factor, k, v, sees, sinks, soft_cap)
    sinks = [] if sinks is None else [put(sinks)]

    def call(q, k, v, *sinks, **options):
        options |= how | more | ({"sinks": sinks[0]} if sinks else {})
        return jaxops.packed_attention(q, k, v, put(ends, jnp.int32), **options)

    outside, keys_outside = (np.r_[0 : e[0], e[-1] : n] for e, n in ((ends, T), (key_ends, S)))
    wide = [put(x, jnp.float32) for x in (q, k, v, dout)]
    wide, narrow = wide[:3] + sinks + wide[3:], lambda: [*map(put, (q, k, v)), *sinks, put(dout)]
    gradients = jax.jit(lambda *x: with_gradients(functools.partial(call, backend="xla"), *x))(*wide)[1:]
    for x, rows in ((q, outside), (dout, outside), (k, keys_outside), (v, keys_outside)):
        x[rows] = np.nan
    found = jax.jit(lambda *x: with_gradients(functools.partial(call, plan=Plan("triton", fwd=tiles)), *x))(*narrow())
    assert_close(found[0], wanted, dtype, scale=2)
    assert not np.asarray(found[0], np.float32)[outside].any()
    for name, got, want in zip("qkvs", found[1:], gradients, strict=False):
        assert_close(got, want, dtype, scale=4, name=f"d{name}")


@pytest.mark.hopper
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("packing", ["unequal", "cross"])
def test_masks(packing, mask):
    check(packing, mask, NARROW)


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("packing", "mask", "options"),
    [
        ("one", "causal", {"dim": 128}),
        ("one", "until-window", {"dim": 64, "dtype": "float16"}),
        ("unequal", "causal", {"dim": 72}),
        ("unequal", "causal-window", {"dim": 32, "scale": -1.5}),
        ("unequal", "whole", {"scale": 0.0}),
        ("one-row", "causal", {}),
        ("outside", "whole", {}),
    ],
    ids=["one", "until", "72-columns", "negative", "zero", "one-row", "outside"],
)
def test_tiles_of_128_keys(packing, mask, options):
    check(packing, mask, WIDE, **options)


@pytest.mark.hopper
@pytest.mark.parametrize("mask", ["whole", "causal-window", "until"])
@pytest.mark.parametrize("packing", ["unequal", "cross"])
def test_sinks_and_cap(packing, mask):
    """With the rows that see nothing, of some masks."""
    check(packing, mask, NARROW, sinks=sinks_of(0), soft_cap=1.5)


@pytest.mark.hopper
@pytest.mark.parametrize("options", [{"sinks": sinks_of(1)}, {"soft_cap": 2, "scale": -0.5}], ids=["sinks", "cap"])
def test_one_of_both(options):
    check("unequal", "causal", WIDE, **options)


@pytest.mark.hopper
def test_wide_heads():
    """The result has the memory of q; there is no room for as many stages of both operands in the backward."""
    check("unequal", "causal", NARROW, dim=200)


@pytest.mark.hopper
@pytest.mark.parametrize("mask", ["whole", "causal-window", "until"])
@pytest.mark.parametrize("packing", ["unequal", "cross"])
def test_one_gradient_a_launch(packing, mask):
    """dk and dv of wide heads, whose columns are in parts."""
    check(packing, mask, NARROW, dim=136, values=136 if mask == "until" else 72, sinks=sinks_of(0), soft_cap=1.5)


@pytest.mark.hopper
@pytest.mark.parametrize(("dim", "values"), [(144, 24), (24, 136), (40, 16), (16, 40)])
def test_values_of_another_width(dim, values):
    """One of them wide, or none."""
    check("unequal", "causal-window", NARROW, dim=dim, values=values)


@pytest.mark.hopper
def test_large_scores():
    """Scores of 2**20 and more: the right result, and NaN gradients; the other sequence's are finite."""
    q, k, v, dout = (x.astype("bfloat16") for x in arrays(0, 40, dim=16))
    q[:20], k[:20] = 0, 0
    q[:20, :, 0], k[:20, :, 0] = 2, 4e6 * (1 + np.arange(20)[:, None] / 32)
    ends = put([0, 20, 40], jnp.int32)
    call = lambda *x: jaxops.packed_attention(*x, ends, plan=Plan("triton", fwd=NARROW))
    out, *gradients = map(np.asarray, with_gradients(call, *map(put, (q, k, v, dout))))
    np.testing.assert_array_equal(out[:20], np.repeat(np.repeat(v[19:20], 2, axis=1), 20, axis=0))
    for x in gradients:
        assert np.isnan(x[:20].astype(np.float32)).all()
        assert np.isfinite(x[20:].astype(np.float32)).all()


@pytest.mark.hopper
@pytest.mark.parametrize("bad", [[5, 3, 300, -7, 2**31 - 1], [-(2**31), 2**31 - 1, 0, 9, 4]], ids=["a", "b"])
@pytest.mark.parametrize("dim", [16, 136])
def test_bad_offsets_stay_in_bounds(bad, dim):
    """Any row may come out, finite."""
    *operands, dout = (put(x, jnp.bfloat16) for x in arrays(0, 300, dim=dim))
    call = lambda *x: jaxops.packed_attention(*x, put(bad, jnp.int32), causal=True, plan=Plan("triton", fwd=NARROW))
    for x in with_gradients(call, *operands, dout):
        assert np.isfinite(np.asarray(x, np.float32)).all()


@pytest.mark.hopper
def test_vmap():
    """The same bits as call by call."""
    many = [put(np.stack([x, 2 * x]), jnp.bfloat16) for x in arrays(0, 40, dim=16)]
    ends = put([0, 20, 40], jnp.int32)
    op = lambda *x: jaxops.packed_attention(*x, ends, causal=True, plan=Plan("triton"))
    call = functools.partial(with_gradients, op)
    for i in range(2):
        for got, want in zip(jax.vmap(call)(*many), call(*(x[i] for x in many)), strict=True):
            np.testing.assert_array_equal(got[i], want)


@pytest.mark.parametrize("seed", range(4))
def test_query_blocks(seed):
    """Of runs of any kind: the keys of a block lie in its tiles, and what is said to be whole is seen by all rows."""
    rng, T, S, bq, bk = np.random.default_rng(seed), 61, 83, 16, 8
    first, end = np.sort(rng.integers(0, S + 1, (2, T)), axis=0).astype(np.int32)
    first = np.where(rng.random(T) < 0.7, first // 4, first)
    first[rng.random(T) < 0.1] = end[:7].max()
    first, end = (np.where(first < end, x, 0).astype(np.int32) for x in (first, end))
    first[16:32] = end[16:32] = 0
    blocks = np.asarray(query_blocks(put(first), put(end), S=S, bq=bq, bk=bk))
    assert sorted(blocks[:, 0]) == list(range(0, T, bq))
    tiles = np.maximum(-(-(blocks[:, 2] - blocks[:, 1]) // bk), 1)
    assert (np.diff(tiles) <= 0).all(), "the longest are not first"
    for (row, least, most, right, masked), number in zip(blocks, tiles, strict=True):
        f, e = first[row : row + bq], end[row : row + bq]
        some = f < e
        if not some.any():
            assert least == most
            continue
        assert (least, most) == (f[some].min(), e[some].max())
        whole = [(f[some] <= least + j * bk).all() and (least + (j + 1) * bk <= e[some]).all() for j in range(number)]
        left = masked - right
        assert whole[left : number - right] == [True] * (number - masked)
        assert not any(whole[:left])
        assert not any(whole[number - right :])


def test_what_it_cannot_run():
    of = functools.partial(Problem, 64, 64, 4, 2)
    with pytest.raises(NotImplementedError, match="q is float32"):
        make_plan(of(64, "float32"), H200, backend="triton")
    with pytest.raises(NotImplementedError, match="a multiple of 8, and this is 76"):
        make_plan(of(76, "bfloat16"), H200, backend="triton")
    with pytest.raises(NotImplementedError, match="triton"):
        make_plan(of(64, "bfloat16"), Device("cpu", "cpu"), backend="triton")


@pytest.mark.hopper
def test_plans():
    problem = Problem(64, 64, 4, 2, 128, "bfloat16")
    plan = make_plan(problem, H200, backend="triton")
    assert plan.fwd == Tiles(128, 128, 8, 2)
    for change in ({}, {"mask": "rows", "cross": True}, {"sinks": True, "soft_cap": True}, {"head_dim": 256}):
        assert make_plan(dataclasses.replace(problem, **change), H200).backend == "triton"
    for change in ({"dtype": "float32"}, {"head_dim": 264}, {"head_dim": 12}):
        assert make_plan(dataclasses.replace(problem, **change), H200).backend == "xla"
    for dim, values in itertools.product((8, 64, 96, 136, 192, 200, 256), repeat=2):  # all fit
        make_plan(dataclasses.replace(problem, head_dim=dim, value_dim=values), H200, backend="triton")
    wide = dataclasses.replace(problem, head_dim=256)
    with pytest.raises(ValueError, match="297984 bytes of shared memory: use fewer stages"):
        make_plan(wide, H200, plan=Plan("triton", dkv=Tiles(64, 128, 8, 3)))
    with pytest.raises(ValueError, match="this needs at least 2 stages"):  # with one the launch would not end
        make_plan(problem, H200, plan=Plan("triton", dq=Tiles(128, 64, 8, 1)))
    with pytest.raises(ValueError, match="this needs bq=128 and warps=8, and bk from 64 to 64"):
        make_plan(wide, H200, plan=Plan("triton", dq=Tiles(128, 128, 8, 1)))
    with pytest.raises(ValueError, match="this needs bq=128 and warps=8, and bk from 64 to 128"):
        make_plan(problem, H200, plan=Plan("triton", fwd=Tiles(64, 64, 4, 2)))
    with pytest.raises(ValueError, match="295680 bytes of shared memory: use fewer stages"):
        make_plan(problem, H200, plan=Plan("triton", fwd=Tiles(128, 128, 8, 4)))
