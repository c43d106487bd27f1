"""Attention to a cache against the reference: shapes, masks, what must not be read, what is written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.cached_attention.fwd_pallas import parts_of
from jaxops.ops.cached_attention.reference import cached_attention_reference
from tests.compare import assert_close
from tests.hopper import lower_for_h200, pallas_costs

NAMES = ("q", "k", "v", "k_cache", "v_cache", "at")
BACKENDS = ["xla", "pallas", pytest.param("auto", marks=pytest.mark.gpu)]


def operands(B: int, K: int, G: int, S: int, H: int, dtype: str) -> dict:
    """Numbers from a row's position on are NaN; positions are the first, the last, none and others."""
    rng = np.random.default_rng(B + S)
    shapes = {"q": (B, K * G, H), "k": (B, K, H), "v": (B, K, H), "k_cache": (B, K, S, H), "v_cache": (B, K, S, H)}
    found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    at = rng.integers(0, S, B).astype(np.int32)
    at[:4] = [S - 1, 0, -1, S][:B]
    for name in ("k_cache", "v_cache"):
        found[name][np.broadcast_to((np.arange(S) >= at[:, None])[:, None, :, None], shapes[name])] = np.nan
    arrays = {name: jnp.asarray(x, dtype) for name, x in found.items()}
    return arrays | {"at": jnp.asarray(at), "sinks": jnp.asarray(rng.normal(size=K * G), jnp.float32)}


def attend(function, a: dict, **how):
    return function(*(a[name] for name in NAMES), **{name: x for name, x in a.items() if name not in NAMES}, **how)


# Of the sizes here the kernel takes 1, 1, 2, 4 and 16 parts of a row; heads of a key are few, one, and more than 16.
SIZES = [(5, 2, 3, 37, 24), (1, 1, 1, 1, 1), (6, 1, 1, 131, 16), (3, 3, 2, 300, 8), (1, 1, 20, 1100, 40)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("sizes", "dtype"), [*((sizes, "float32") for sizes in SIZES), (SIZES[0], "bfloat16")])
@pytest.mark.parametrize("masks", [{}, {"window": 23, "scale": 0.3}], ids=["all", "window"])
def test_values(backend, sizes, dtype, masks):
    a = operands(*sizes, dtype)
    sinks = a.pop("sinks")
    sinks = sinks if masks else None
    out, *caches = attend(jaxops.cached_attention, a, sinks=sinks, precision="highest", backend=backend, **masks)
    want, *want_caches = attend(cached_attention_reference, a, sinks=sinks, **masks)
    assert out.dtype == a["q"].dtype
    assert_close(out, want, dtype)
    for cache, want_cache in zip(caches, want_caches, strict=True):
        np.testing.assert_array_equal(cache.astype(jnp.float32), want_cache)


def test_how_a_row_is_split():
    """Two programs for each of 132 multiprocessors where the rows are few, never parts of less than 64 tokens."""
    assert parts_of(1, 4, 1152, 132) == (16, 32)
    assert parts_of(16, 4, 1152, 132) == (4, 64)
    assert parts_of(64, 4, 1152, 132) == (1, 64)
    assert parts_of(1, 4, 32_768, 132) == (64, 32)
    assert parts_of(1, 1, 63, 132) == (1, 64)


@pytest.mark.parametrize(("B", "kernels"), [(64, 1), (1, 2)])
def test_on_an_h200(B, kernels):
    """One kernel, or two where a row is split, that write the caches in place; XLA adds no pass over them."""
    shape = lambda *size, dtype="bfloat16": jax.ShapeDtypeStruct(size, dtype)
    cache, new = shape(B, 4, 1152, 128), shape(B, 4, 128)
    text = lower_for_h200(jaxops.cached_attention, shape(B, 32, 128), new, new, cache, cache, shape(B, dtype="int32"))
    calls = [line for line in text.splitlines() if "custom_call" in line]
    assert len(calls) == kernels
    assert calls[0].count("operand_index = ") == 2
    others = [line for line in text.splitlines() if "custom_call" not in line and "return" not in line]
    assert not [line for line in others if f"{B}x4x1152x128" in line]


def test_cost():
    """Of 2 rows in 4 parts: two products of 6 heads with 300 tokens of 8 numbers; two caches of 28,800 bytes, queries
    and results of 192. Then sums of 4 parts."""
    shape = lambda *size, dtype="bfloat16": jax.ShapeDtypeStruct(size, dtype)
    cache, new = shape(2, 3, 300, 8), shape(2, 3, 8)
    call = functools.partial(jaxops.cached_attention, backend="pallas")
    costs = pallas_costs(call, shape(2, 6, 8), new, new, cache, cache, shape(2, dtype="int32"))
    (_, flops, nbytes), (_, of_sums, _) = costs
    assert (flops, nbytes, of_sums) == (4 * 2 * 6 * 300 * 8, 2 * 28_800 + 2 * 192, 2 * 4 * 2 * 6 * 8)


def test_two_tokens_after_another():
    """In a loop, with a donated cache: what one step writes the next one reads."""
    a = operands(5, 2, 3, 37, 24, "float32")
    a["k_cache"], a["v_cache"] = jnp.zeros_like(a["k_cache"]), jnp.zeros_like(a["v_cache"])

    @functools.partial(jax.jit, donate_argnames=("k_cache", "v_cache"), static_argnames="backend")
    def two(q, k, v, k_cache, v_cache, at, backend):
        def step(carry, n):
            out, *caches = jaxops.cached_attention(q, k + n, v + n, *carry, at + n, backend=backend)
            return tuple(caches), out

        return jax.lax.scan(step, (k_cache, v_cache), jnp.arange(2, dtype=jnp.int32))

    del a["sinks"]
    runs = [two(**(a | {name: a[name].copy() for name in ("k_cache", "v_cache")}), backend=b) for b in BACKENDS[:2]]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *runs)


WRONG = {
    "heads": (lambda a: {"q": a["q"][:, :5]}, "no multiple"),
    "head_dim": (lambda a: {"k": a["k"][:, :, 1:]}, "needed are"),
    "rows": (lambda a: {"v_cache": a["v_cache"][1:]}, "needed are"),
    "positions": (lambda a: {"at": a["at"][1:]}, "position of each row"),
    "dtype of positions": (lambda a: {"at": a["at"].astype(jnp.int8)}, "int32"),
    "sinks": (lambda a: {"sinks": a["sinks"][1:]}, "sinks"),
    "window": (lambda a: {"window": -1}, "window"),
    "backend": (lambda a: {"backend": "cudnn"}, "backend"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    a = operands(5, 2, 3, 37, 24, "float32")
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        attend(jaxops.cached_attention, a | change(a))


def test_caches_of_two_dtypes():
    a = operands(5, 2, 3, 37, 24, "float32")
    with pytest.raises(TypeError, match="v_cache is float32"):
        attend(jaxops.cached_attention, a | {"k_cache": a["k_cache"].astype(jnp.bfloat16)})
