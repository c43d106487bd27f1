"""Attention of one token a row, as in decoding, to the tokens before it, whose keys and values are in a cache."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.checks import check_array, check_choice, check_float, check_integer, check_number, check_size
from jaxops._lib.device import device_of
from jaxops._lib.differentiable import differentiable_as
from jaxops._lib.manual_axes import vary_together
from jaxops._lib.precision import resolve_precision
from jaxops.ops.cached_attention.fwd_pallas import cached_pallas
from jaxops.ops.cached_attention.xla import Attended, How, cached_xla


def cached_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, k_cache: jax.Array, v_cache: jax.Array, at: jax.Array, *,
    scale: float | None = None, window: int | None = None, sinks: jax.Array | None = None,
    precision: lax.PrecisionLike = None, backend: str = "auto",
) -> Attended:  # fmt: skip
    """A decode step's attention: each row's new token attends to itself and to the tokens in the row's cache, and its
    key and value are written there.

    On a GPU one kernel reads the cache once and writes the token's place in it; where rows are few, several programs
    share a row, and a second kernel adds their parts. XLA takes a scatter, two products and a softmax. The caches are
    updated in place where the given ones are used no more, as in a `jax.lax.scan` or with donated arguments. No host
    sync; new positions never recompile. Two runs give the same bits.

    >>> import jax.numpy as jnp, jaxops
    >>> cache = jnp.zeros((1, 1, 4, 2))  # one row with room for 4 tokens, one head of 2 numbers
    >>> q, k, v = (jnp.full((1, 1, 2), value) for value in (0.0, 1.0, 5.0))
    >>> at = jnp.array([0], jnp.int32)
    >>> out, keys, values = jaxops.cached_attention(q, k, v, cache, cache, at)
    >>> out, keys, values = jaxops.cached_attention(q, k, v + 2, keys, values, at + 1)
    >>> out.tolist(), values[0, 0, :, 0].tolist()
    ([[[6.0, 6.0]]], [5.0, 7.0, 0.0, 0.0])

    Args:
      q: [B, heads, head_dim] of B rows' new tokens, bfloat16, float16 or float32.
      k, v: [B, kv_heads, head_dim]; heads is a multiple of kv_heads. Cast to the caches' dtype.
      k_cache, v_cache: [B, kv_heads, S, head_dim] in one dtype, to which queries are cast. Numbers from a row's own
        position on are not read.
      at: int32 [B], the position of each row's token, of which all before are in the cache. A row whose position is not
        in [0, S) has a zero result, and its cache stays as it is.
      scale: a Python number, the factor on scores; 1 / sqrt(head_dim) by default.
      window: how many tokens right before itself a token sees, as of `jaxops.packed_attention`; None for all.
      sinks: float32 [heads], a score beside those of the keys, without a value.
      precision: of float32 products, as in `jax.lax.dot`. None follows `jax_default_matmul_precision`.
      backend: "auto" takes the Pallas kernel on a GPU, XLA on CPU and TPU; "pallas" (interpreted on a CPU) or "xla"
        runs.

    Returns:
      ([B, heads, head_dim] in q's dtype, the keys' new cache, the values' new cache).

    Raises:
      ValueError: shapes that do not fit together, a negative window, an unknown backend.
      TypeError: unsupported or unequal dtypes, numbers that are no Python numbers.
      NotImplementedError: a precision algorithm that the kernel does not have.

    Its gradient is that of the XLA backend.

    Source: splitting a row's keys over programs is Flash-Decoding (Dao, Haziza, Massa, Sizov 2023,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html); sinks are those of gpt-oss.
    """
    check_choice("backend", backend, ("auto", "pallas", "xla"))
    sinks = _checked(q, k, v, k_cache, v_cache, at, sinks)
    (B, N, H), S = q.shape, k_cache.shape[2]
    factor = max(H, 1) ** -0.5 if scale is None else check_number("scale", scale)
    window = None if window is None else check_integer("window", window, 0)
    precision, compute = resolve_precision(precision, k_cache.dtype)
    device = device_of(q, k_cache, at)
    kernel = backend == "pallas" or (backend == "auto" and device.has((8, 0)))
    if S == 0:
        return jnp.zeros_like(q), k_cache, v_cache
    # Casts for another precision would copy the caches.
    kernel = kernel and 0 not in (B, N, H) and compute == k_cache.dtype
    how = How(factor, window, precision, kernel, device.interpret, device.cores)
    q, k, v, k_cache, v_cache, at, sinks = vary_together(q, k, v, k_cache, v_cache, at, sinks)
    new = (x.astype(k_cache.dtype) for x in (q, k, v))
    out, k_cache, v_cache = _attend(how, *new, k_cache, v_cache, at, sinks)
    return out.astype(q.dtype), k_cache, v_cache


def _checked(q, k, v, k_cache, v_cache, at, sinks) -> jax.Array | None:
    """sinks, after checks of everything."""
    check_float("q", q, "[B, heads, head_dim]")
    B, N, H = q.shape
    for name, x in (("k", k), ("v", v)):
        check_float(name, x, "[B, kv_heads, head_dim]")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_float(name, x, "[B, kv_heads, S, head_dim]")
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(f"k_cache is {k_cache.dtype}, but v_cache is {v_cache.dtype}: they must be equal.")
    K, S = k_cache.shape[1:3]
    if (v.shape, v_cache.shape) != (k.shape, k_cache.shape) or (k.shape, k_cache.shape) != ((B, K, H), (B, K, S, H)):
        shapes = f"k {k.shape}, v {v.shape}, k_cache {k_cache.shape}, v_cache {v_cache.shape}"
        raise ValueError(
            f"q is {q.shape}, {shapes}; needed are [B, kv_heads, head_dim] and [B, kv_heads, S, head_dim]."
        )
    if N % max(K, 1) or K == 0 < N:
        raise ValueError(f"q has {N} heads, which are no multiple of the keys' {K}.")
    check_array("at", at, "int32 [B]")
    if at.shape != (B,) or at.dtype != jnp.int32:
        raise ValueError(f"at is {at.dtype} {at.shape}; needed is int32 [{B}], a position of each row.")
    if sinks is None:
        return None
    check_float("sinks", sinks, "[heads]")
    check_size("the number of sinks", sinks.shape[0], "that of q's heads", N)
    return sinks.astype(jnp.float32)


def _either(how: How, q, k, v, k_cache, v_cache, at, sinks) -> Attended:
    if not how.kernel:
        return cached_xla(how, q, k, v, k_cache, v_cache, at, sinks)
    first = jnp.zeros_like(at) if how.window is None else jnp.maximum(at - how.window, 0)
    operands = {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "at": at, "first": first}
    kind = {"scale": how.scale, "precision": how.precision, "cores": how.cores, "interpret": how.interpret}
    return cached_pallas(operands | {"sinks": sinks}, **kind)


_attend = differentiable_as(_either, cached_xla, static=1)
