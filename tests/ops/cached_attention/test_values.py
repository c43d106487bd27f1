"""Attention to a cache against the reference: shapes, masks, what must not be read, what is written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.cached_attention.reference import cached_attention_reference
from tests.compare import assert_close
from tests.hopper import lower_for_h200, pallas_costs

NAMES = ("qkv", "k_cache", "v_cache", "at")
# In one program, which has the reference once: without jit in tests/contracts/test_eager.py.
TOGETHER = [pytest.param(("xla", "pallas"), id="xla-pallas"), pytest.param(("auto",), marks=pytest.mark.gpu, id="auto")]


def operands(B: int, K: int, G: int, S: int, H: int, dtype: str) -> dict:
    """Numbers from a row's position on are NaN, and rows without a position; those are the first, the last, none and
    others."""
    rng = np.random.default_rng(B + S)
    shapes = {"qkv": (B, K * (G + 2), H), "k_cache": (B, K, S, H), "v_cache": (B, K, S, H)}
    found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    at = rng.integers(0, S, B).astype(np.int32)
    at[:4] = [S - 1, 0, -1, S][:B]
    found["qkv"][(at < 0) | (at >= S)] = np.nan
    for name in ("k_cache", "v_cache"):
        found[name][np.broadcast_to((np.arange(S) >= at[:, None])[:, None, :, None], shapes[name])] = np.nan
    arrays = {name: jnp.asarray(x, dtype) for name, x in found.items()}
    return arrays | {"at": jnp.asarray(at), "sinks": jnp.asarray(rng.normal(size=K * G), jnp.float32)}


def turned(B: int, H: int, features: int) -> dict:
    """Norms of queries and keys, and rotations of their first features."""
    rng = np.random.default_rng(H)
    weights = tuple(jnp.asarray(rng.normal(size=H), jnp.float32) for _ in range(2))
    angles = rng.normal(size=(B, features // 2))
    rotary = tuple(jnp.asarray(turn(angles), jnp.float32) for turn in (np.cos, np.sin))
    return {"qk_norm": weights, "rotary": rotary, "epsilon": 0.3}


def attend(function, a: dict, **how):
    return function(*(a[name] for name in NAMES), **{name: x for name, x in a.items() if name not in NAMES}, **how)


def by_each(backends: tuple[str, ...], **how):
    """A function of operands that gives the results by each backend, in one program."""
    every = [functools.partial(attend, jaxops.cached_attention, backend=backend, **how) for backend in backends]
    run = jax.jit(lambda a: [call(a)[0] for call in every])
    return lambda a: list(map(np.asarray, run(a)))


# Of the sizes here the kernel takes 1, 1, 2, 4 and 16 parts of a row; heads of a key are few, one, and more than 16.
SIZES = [(5, 2, 3, 37, 24), (1, 1, 1, 1, 1), (6, 1, 1, 131, 16), (3, 3, 2, 300, 8), (1, 1, 20, 1100, 40)]


# Features that are rotated: all, some, of heads with an odd number of them, and all of a head of two.
TURNED = [(SIZES[0], 24, ""), (SIZES[3], 6, ""), ((2, 2, 2, 7, 5), 2, ""), ((3, 1, 2, 5, 2), 2, ""),
          (SIZES[0], 10, "qk_norm"), (SIZES[0], 24, "rotary")]  # fmt: skip
CASES = [*((sizes, "float32", 0, "") for sizes in SIZES), (SIZES[0], "bfloat16", 0, "")]
CASES += [(sizes, "float32", features, left_out) for sizes, features, left_out in TURNED]


@pytest.mark.parametrize("backends", TOGETHER)
@pytest.mark.parametrize(("sizes", "dtype", "features", "left_out"), CASES)
def test_values(backends, sizes, dtype, features, left_out):
    """Of all tokens, and of a window with sinks; or with norms and rotations, one of which may be left out. A row
    without a position has a zero result. Caches are equal up to the rounding of norms and rotations."""
    a = operands(*sizes, dtype)
    ways = {"all": {}, "window": {"window": 23, "scale": 0.3, "sinks": a.pop("sinks")}}
    if features:
        options = turned(sizes[0], sizes[-1], features)
        ways = {"turned": {name: x for name, x in options.items() if name != left_out}}

    @jax.jit
    def everything(a):
        rows = (a["at"] >= 0) & (a["at"] < a["k_cache"].shape[2])
        clean = a | {"qkv": jnp.where(rows[:, None, None], a["qkv"], 0)}
        found = {}
        for name, options in ways.items():
            call = functools.partial(attend, functools.partial(jaxops.cached_attention, precision="highest"), **options)
            results = [call(a, backend=backend) for backend in backends]
            found[name] = attend(cached_attention_reference, clean, **options), results
        return found

    tolerance = {"rtol": 1e-2 if dtype == "bfloat16" else 1e-5, "atol": 1e-6}
    for name, ((want, *want_caches), results) in everything(a).items():
        for backend, (out, *caches) in zip(backends, results, strict=True):
            assert out.dtype == a["qkv"].dtype
            assert_close(out, want, dtype, name=f"{name}, {backend}")
            for cache, want_cache in zip(caches, want_caches, strict=True):
                np.testing.assert_allclose(cache.astype(jnp.float32), want_cache, **tolerance)


def test_a_row_without_a_position_is_zero_and_has_no_gradient():
    """Whatever numbers it has, and with an epsilon of 0."""
    a = operands(5, 2, 3, 37, 24, "float32")
    del a["sinks"]
    how = turned(5, 24, 10) | {"epsilon": 0.0}
    caches = {name: jnp.nan_to_num(a[name]) for name in ("k_cache", "v_cache")}
    call = lambda qkv, backend: attend(jaxops.cached_attention, a | caches | {"qkv": qkv}, backend=backend, **how)[0]

    @jax.jit
    def everything(qkv):
        gradient = jax.grad(lambda qkv: jnp.sum(call(qkv, "xla")))(qkv)
        return gradient, [call(qkv, backend) for backend in ("xla", "pallas")]

    gradient, results = jax.tree.map(np.asarray, everything(a["qkv"]))
    for out in (*results, gradient):
        assert not out[2:4].any()
    assert np.isfinite(gradient).all()
    assert gradient[0].any()


@pytest.mark.parametrize("backends", TOGETHER)
def test_scores_far_below_zero(backends):
    """All equal, in 16 parts: the result is the mean of the values."""
    _, K, _, S, H = SIZES[4]
    q, k = -jnp.ones((1, 20, H)), jnp.ones((1, K, H))
    values = jnp.asarray(np.random.default_rng(0).normal(size=(1, K, S, H)), jnp.float32)
    qkv = jnp.concatenate([q, k, values[:, :, S - 1]], axis=1)
    at = jnp.array([S - 1], jnp.int32)
    caches = {"k_cache": jnp.ones((1, K, S, H)), "v_cache": values}
    mean = np.broadcast_to(np.mean(values, axis=2), q.shape)
    for out in by_each(backends, scale=10.0)(caches | {"qkv": qkv, "at": at}):
        np.testing.assert_allclose(out, mean, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("B", "kernels"), [(64, 1), (1, 2)])
def test_on_an_h200(B, kernels):
    """One kernel, or two where a row is split, that write the caches in place; XLA adds no pass over them."""
    shape = lambda *size, dtype="bfloat16": jax.ShapeDtypeStruct(size, dtype)
    cache, weight, turn = shape(B, 4, 1152, 128), shape(128, dtype="float32"), shape(B, 64, dtype="float32")
    call = lambda *a: jaxops.cached_attention(*a[:4], qk_norm=a[4], rotary=a[5])
    text = lower_for_h200(call, shape(B, 40, 128), cache, cache, shape(B, dtype="int32"), (weight,) * 2, (turn,) * 2)
    calls = [line for line in text.splitlines() if "custom_call" in line]
    assert len(calls) == kernels
    assert calls[0].count("operand_index = ") == 2
    others = [line for line in text.splitlines() if "custom_call" not in line and "return" not in line]
    assert not [line for line in others if f"{B}x4x1152x128" in line]


def test_cost():
    """Of 2 rows in 4 parts: two products of 6 heads with 300 tokens of 8 numbers; two caches of 28,800 bytes, 384 bytes
    of heads and 192 of results. Then sums of 4 parts. With a window of 9, of 10 tokens in one part."""
    shape = lambda *size, dtype="bfloat16": jax.ShapeDtypeStruct(size, dtype)
    cache, own = shape(2, 3, 300, 8), 384 + 192

    def costs(window):
        call = functools.partial(jaxops.cached_attention, backend="pallas", window=window)
        found = pallas_costs(call, shape(2, 12, 8), cache, cache, shape(2, dtype="int32"))
        return [cost[1:] for cost in found]

    whole, (of_sums, _) = costs(None)
    assert (whole, of_sums) == ((4 * 2 * 6 * 300 * 8, 2 * 28_800 + own), 2 * 4 * 2 * 6 * 8)
    assert costs(9) == [(4 * 2 * 6 * 10 * 8, 2 * 28_800 * 10 // 300 + own)]


def test_two_tokens_after_another():
    """In a loop, with a donated cache: what one step writes the next one reads."""
    a = operands(5, 2, 3, 37, 24, "float32")
    a["k_cache"], a["v_cache"] = jnp.zeros_like(a["k_cache"]), jnp.zeros_like(a["v_cache"])

    @functools.partial(jax.jit, donate_argnames=("k_cache", "v_cache"), static_argnames="backend")
    def two(qkv, k_cache, v_cache, at, backend):
        def step(carry, n):
            out, *caches = jaxops.cached_attention(qkv + n, *carry, at + n, backend=backend)
            return tuple(caches), out

        return jax.lax.scan(step, (k_cache, v_cache), jnp.arange(2, dtype=jnp.int32))

    del a["sinks"]
    runs = [
        two(**(a | {name: a[name].copy() for name in ("k_cache", "v_cache")}), backend=b) for b in ("xla", "pallas")
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *runs)


@pytest.mark.parametrize("backends", TOGETHER)
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_mixed_dtypes(backends, dtypes):
    """Queries are multiplied in the caches' dtype; the result is not rounded to it."""
    a = operands(5, 2, 3, 37, 24, "float32")
    own, caches = dtypes
    a |= {"qkv": a["qkv"].astype(own)} | {name: a[name].astype(caches) for name in ("k_cache", "v_cache")}
    clean = a | {"qkv": jnp.nan_to_num(a["qkv"]).astype(caches)}
    want = jax.jit(functools.partial(attend, cached_attention_reference))(clean)[0]
    for out in by_each(backends)(a):
        assert out.dtype == own
        assert_close(out, want, "bfloat16")
        assert own != "float32" or np.any(out != out.astype(jnp.dtype(caches)).astype(own))


@pytest.mark.parametrize("backends", TOGETHER)
def test_products_in_bfloat16_of_float32(backends):
    """By precision; values of the caches stay."""
    a = operands(5, 2, 3, 37, 24, "float32")
    each = (by_each(backends, precision=precision)(a) for precision in ("BF16_BF16_F32", "highest"))
    for rounded, exact in zip(*each, strict=True):
        assert 1e-4 < np.max(np.abs(rounded - exact)) < 3e-2


@pytest.mark.parametrize("backends", TOGETHER)
def test_sinks_of_any_size(backends):
    """Rows without a position are zero all the same; a sink of -inf is none."""
    a = operands(5, 2, 3, 37, 24, "float32")
    sinks = a.pop("sinks")
    run = by_each(backends)
    without = run(a)
    for value in (np.inf, np.nan, -np.inf):
        for out, want in zip(run(a | {"sinks": jnp.full_like(sinks, value)}), without, strict=True):
            assert not out[2:4].any()
            if value < 0:
                np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def test_a_window_as_long_as_any():
    a = operands(5, 2, 3, 37, 24, "float32")
    whole, wide = (by_each(("xla", "pallas"), window=window)(a) for window in (None, 2**64))
    jax.tree.map(np.testing.assert_array_equal, whole, wide)
