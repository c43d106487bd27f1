"""Attention of one token a row, as in decoding, to the tokens before it, whose keys and values are in a cache."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.checks import check_exact, check_float, check_integer, check_number, type_name
from jaxops._lib.arrays.differentiable import differentiable_as
from jaxops._lib.arrays.precision import resolve_precision
from jaxops.ops.cached_attention.fwd_pallas import cached_pallas
from jaxops.ops.cached_attention.plan import PLANNER, Plan, Problem
from jaxops.ops.cached_attention.xla import Attended, Options, cached_xla


def cached_attention(
    qkv: jax.Array, k_cache: jax.Array, v_cache: jax.Array, at: jax.Array, *,
    qk_norm: tuple[jax.Array, jax.Array] | None = None, epsilon: float = 1e-6,
    rotary: tuple[jax.Array, jax.Array] | None = None,
    scale: float | None = None, window: int | None = None, sinks: jax.Array | None = None,
    precision: lax.PrecisionLike = None, backend: str = "auto", plan: Plan | None = None,
) -> Attended:  # fmt: skip
    """A decode step's attention: each row's new token attends to itself and to the tokens in the row's cache, and its
    key and value are written there. Queries and keys may be normalized and rotated before.

    On an NVIDIA GPU one kernel reads the cache once and writes the token's place in it; where rows are few, several
    programs share a row, and a second kernel adds their parts. XLA takes a scatter, two products and a softmax. The
    caches are updated in place where the given ones are used no more, as in a `jax.lax.scan` or with donated arguments.
    No host sync; new positions never recompile. Two runs give the same bits.

    >>> import jax.numpy as jnp, jaxops
    >>> cache = jnp.zeros((1, 1, 4, 2))  # one row with room for 4 tokens, one head of 2 numbers
    >>> qkv = jnp.array([[[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]]])  # a query, a key and a value
    >>> at = jnp.array([0], jnp.int32)
    >>> out, keys, values = jaxops.cached_attention(qkv, cache, cache, at)
    >>> out, keys, values = jaxops.cached_attention(qkv.at[0, 2].add(2), keys, values, at + 1)
    >>> out.tolist(), values[0, 0, :, 0].tolist()
    ([[[6.0, 6.0]]], [5.0, 7.0, 0.0, 0.0])

    Args:
      qkv: [B, heads + 2 * kv_heads, head_dim] of B rows' new tokens: the heads of queries, those of keys, and those of
        values, as one product with all three matrices makes them. bfloat16, float16 or float32. heads is a multiple of
        kv_heads.
      k_cache, v_cache: [B, kv_heads, S, head_dim] in one dtype, to which queries, keys and values are cast. Numbers
        from a row's own position on are not read.
      at: int32 [B], each row's position: the tokens before it are in the cache. A row whose position is not in [0, S)
        has a zero result, and its cache stays as it is.
      qk_norm: weights [head_dim] of the RMS norms of each head of the queries and of the keys, as in Qwen3; computed in
        float32.
      epsilon: a Python number, added to the mean squares.
      rotary: (cos, sin), each [B, features / 2], of the angles by which the first features of queries and keys are
        turned after that, in pairs half of the features apart.
      scale: a Python number, the factor on scores; 1 / sqrt(head_dim) by default.
      window: how many tokens right before itself a token sees, as of `jaxops.packed_attention`; None for all.
      sinks: float32 [heads], a score beside those of the keys, without a value.
      precision: of float32 products, as in `jax.lax.dot`. None follows `jax_default_matmul_precision`.
      backend: "auto" takes the Pallas kernel on an NVIDIA GPU, XLA elsewhere and for heads that the kernel cannot hold;
        "pallas" (interpreted on a CPU) or "xla" runs or raises.
      plan: a `Plan` instead of the tuned or heuristic one.

    Returns:
      ([B, heads, head_dim] in qkv's dtype, the keys' new cache, the values' new cache).

    Raises:
      ValueError: shapes that do not fit together, a negative window or epsilon, an unknown backend.
      TypeError: unsupported or unequal dtypes, numbers that are not known when the call is traced, another op's plan.
      NotImplementedError: the backend cannot run this problem on this device; a precision algorithm that it lacks.

    Its gradient is that of the XLA backend.

    Source: splitting a row's keys over programs is Flash-Decoding (Dao, Haziza, Massa, Sizov 2023,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html); sinks are those of gpt-oss.
    """
    _check_shapes(qkv, k_cache, v_cache, at)
    (B, _, H), (K, S) = qkv.shape, k_cache.shape[1:3]
    N = qkv.shape[1] - 2 * K
    sinks = _float32("sinks", sinks, (N,), "[heads]")
    weights, turns = _pair("qk_norm", qk_norm, (H,), "[head_dim]"), _rotary_pair(rotary, B, H)
    factor = max(H, 1) ** -0.5 if scale is None else check_number("scale", scale)
    window = None if window is None else min(check_integer("window", window, 0), S)
    epsilon = check_number("epsilon", epsilon, 0)
    precision, compute = resolve_precision(precision, k_cache.dtype)
    options = Options(factor, epsilon, window, precision, compute.name)
    problem = Problem(B, N, K, options.seen(S), H, k_cache.dtype.name)
    plan, *operands = PLANNER.prepare(problem, backend, plan, qkv, k_cache, v_cache, at, sinks, weights, turns)
    if S == 0:
        return jnp.zeros((B, N, H), qkv.dtype), k_cache, v_cache
    return _attend(options, plan, *operands)


def _check_shapes(qkv: jax.Array, k_cache: jax.Array, v_cache: jax.Array, at: jax.Array) -> None:
    check_float("qkv", qkv, "[B, heads + 2 * kv_heads, head_dim]")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_float(name, x, "[B, kv_heads, S, head_dim]")
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(f"k_cache is {k_cache.dtype}, but v_cache is {v_cache.dtype}: they must be equal.")
    (B, every, H), (K, S) = qkv.shape, k_cache.shape[1:3]
    if (k_cache.shape, v_cache.shape) != ((B, K, S, H),) * 2:
        shapes = f"k_cache {k_cache.shape}, v_cache {v_cache.shape}"
        raise ValueError(f"qkv is {qkv.shape}, {shapes}; needed are [B, heads, head_dim], [B, kv_heads, S, head_dim].")
    if every < 2 * K or (every - 2 * K) % max(K, 1) or K == 0 < every:
        raise ValueError(
            f"qkv has {every} heads; needed are a multiple of {K} of queries, then {K} of keys and {K} of values."
        )
    check_exact("at", at, "int32", "[B]", (B,), "a position of each row")


def _pair(name: str, pair: Any, shape: tuple[int | None, ...], what: str) -> tuple[jax.Array, ...] | None:
    """Both arrays in float32, of one shape; None in the shape stands for any size."""
    if pair is None:
        return None
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"{name} is {type_name(pair)}; needed is a pair of arrays, each {what}.")
    first = _float32(f"{name}[0]", pair[0], shape, what)
    return first, _float32(f"{name}[1]", pair[1], first.shape, what)


def _rotary_pair(rotary: Any, B: int, head_dim: int) -> tuple[jax.Array, ...] | None:
    """None also where no feature is rotated."""
    pair = _pair("rotary", rotary, (B, None), "[B, features / 2]")
    features = 0 if pair is None else 2 * pair[0].shape[1]
    if features > head_dim:
        raise ValueError(f"rotary is for {features} features, but head_dim is {head_dim}.")
    return pair if features else None


def _float32(name: str, x: jax.Array | None, shape: tuple[int | None, ...], what: str) -> Any:
    if x is None:
        return None
    check_float(name, x, what)
    if any(need not in (None, size) for size, need in zip(x.shape, shape, strict=True)):
        needed = ", ".join("any" if need is None else str(need) for need in shape)
        raise ValueError(f"{name} has shape {x.shape}; it must be {what}: [{needed}].")
    return x.astype(jnp.float32)


def _either(options: Options, plan: Plan, qkv, k_cache, v_cache, at, sinks, qk_norm, rotary) -> Attended:
    if plan.backend == "xla" or 0 in k_cache.shape or qkv.shape[1] == 2 * k_cache.shape[1]:
        return cached_xla(options, qkv, k_cache, v_cache, at, sinks, qk_norm, rotary)
    assert plan.fwd is not None  # make_plan fills it
    operands = {"qkv": qkv, "k_cache": k_cache, "v_cache": v_cache, "at": at, "sinks": sinks}
    for names, pair in ((("q_weight", "k_weight"), qk_norm), (("cos", "sin"), rotary)):
        operands |= dict(zip(names, pair or (None, None), strict=True))
    return cached_pallas(plan.fwd, options, operands, interpret=plan.on.interpret)


def _plain(options: Options, _: Plan, *operands) -> Attended:
    return cached_xla(options, *operands)


_attend = differentiable_as(_either, _plain, static=2)
