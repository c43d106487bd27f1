"""Attention of one token a row to its cache (Pallas on Triton): a program owns a part of a row's cache and the queries
that share its keys, a second kernel adds the parts."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.launch_pallas import launch_named
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.masked_pallas import load, store
from jaxops._lib.powers import power_of_2
from jaxops._lib.traced_once import traced_once

LOG2_E = math.log2(math.e)  # the GPU has 2 ** x, not e ** x
NONE = -1e30  # the largest score before the first one: finite, so that a part without tokens is no NaN
_FEWEST = 16  # rows and columns of a product on tensor cores


def parts_of(B: int, K: int, S: int, cores: int) -> tuple[int, int]:
    """(parts of a row's cache, cached tokens that a program reads at once).

    Two programs a multiprocessor read as fast as more do. A part has at least 64 tokens: more parts take longer to add
    than they save.
    """
    most = max(1, min(2 * cores // (B * K), S // 64))
    parts = 1 << most.bit_length() - 1
    return parts, 32 if parts >= 16 else 64


def _part_kernel(ref: dict, *, scale: float, precision: lax.Precision, length: int, block: int):
    """Scores are in powers of 2. Part 0 begins with the token itself, and with the sinks."""
    (_, N, H), (_, K, S, _) = ref["q"].shape, ref["k_cache"].shape
    group = N // K
    heads, columns = max(_FEWEST, power_of_2(group)), max(_FEWEST, power_of_2(H))
    b, kv_head, part = pl.program_id(0) // K, pl.program_id(0) % K, pl.program_id(1)
    row, column = jnp.arange(heads, dtype=jnp.int32), jnp.arange(columns, dtype=jnp.int32)
    at, first = plgpu.load(ref["at"].at[b]), plgpu.load(ref["first"].at[b])
    inside, head = (at >= 0) & (at < S), kv_head * group + row
    mine, column_in = (row < group) & inside, column < H
    q = load(ref["q"], (b, head[:, None], column[None, :]), mine[:, None] & column_in[None, :])
    k, v = (load(ref[name], (b, kv_head, column), column_in & inside) for name in ("k", "v"))

    own = scale * LOG2_E * jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32)[None, :], axis=1)
    top, total = own, jnp.ones((heads,), jnp.float32)
    if "sinks" in ref:
        sinks = LOG2_E * load(ref["sinks"], (head,), row < group)
        top = jnp.maximum(own, sinks)
        total = jnp.exp2(own - top) + jnp.exp2(sinks - top)
    mixed = jnp.exp2(own - top)[:, None] * v.astype(jnp.float32)[None, :]
    begins = jnp.broadcast_to(part == 0, (heads,))
    start = (
        jnp.where(begins[:, None], mixed, 0.0),
        jnp.where(begins, top, NONE),
        jnp.where(begins, total, 0.0),
    )

    def step(i, carry):
        mixed, top, total = carry
        token = part * length + i * block + jnp.arange(block, dtype=jnp.int32)
        seen = (first <= token) & (token < at)
        k, v = (
            load(ref[name], (b, kv_head, token[:, None], column[None, :]), seen[:, None] & column_in[None, :])
            for name in ("k_cache", "v_cache")
        )
        scores = scale * LOG2_E * plgpu.dot(q, k, trans_b=True, precision=precision)
        scores = jnp.where(seen[None, :], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        p, before = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
        mixed = before[:, None] * mixed + plgpu.dot(p.astype(v.dtype), v, precision=precision)
        return mixed, new_top, before * total + jnp.sum(p, axis=1)

    begin = part * length
    end = jnp.where(inside, jnp.minimum(at, begin + length), 0)  # of the tokens of this part that are seen
    steps = jnp.maximum(end - begin + block - 1, 0) // block
    skipped = jnp.clip((first - begin) // block, 0, steps)
    mixed, top, total = lax.fori_loop(skipped, steps, step, start)

    mask = (row < group)[:, None] & column_in[None, :]
    if "out" in ref:  # there is one part
        store(ref["out"], (b, head[:, None], column[None, :]), mixed / total[:, None], mask)
    else:
        store(ref["mixed"], (part, b, head[:, None], column[None, :]), mixed, mask)
        store(ref["top"], (part, b, head), top, row < group)
        store(ref["total"], (part, b, head), total, row < group)
    # No program reads this place of the cache.
    written = column_in & inside & (part == 0)
    store(ref["new_k_cache"], (b, kv_head, at, column), k, written)
    store(ref["new_v_cache"], (b, kv_head, at, column), v, written)


def _sum_kernel(ref: dict):
    """A program's head of a row."""
    parts, _, N, H = ref["mixed"].shape
    b, head = pl.program_id(0) // N, pl.program_id(0) % N
    n, column = jnp.arange(parts, dtype=jnp.int32), jnp.arange(power_of_2(H), dtype=jnp.int32)
    top = load(ref["top"], (n, b, head))
    total = load(ref["total"], (n, b, head))
    mixed = load(ref["mixed"], (n[:, None], b, head, column[None, :]), (column < H)[None, :])
    share = jnp.exp2(top - jnp.max(top))
    share = share / jnp.sum(share * total)
    store(ref["out"], (b, head, column), jnp.sum(share[:, None] * mixed, axis=0), column < H)


@traced_once("scale", "precision", "cores", "interpret")
def cached_pallas(
    operands: dict, *, scale: float, precision: lax.Precision, cores: int, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out [B, N, H], the caches), which are written in place where the given ones are used no more. No size is 0.

    Args:
      operands: q, k, v, k_cache, v_cache, at, first (int32 [B], the first token that a row sees) and sinks or None.
    """
    q, k_cache, v_cache = (operands[name] for name in ("q", "k_cache", "v_cache"))
    (B, N, H), (_, K, S, _) = q.shape, k_cache.shape
    parts, block = parts_of(B, K, S, cores)
    struct = functools.partial(out_struct, like=q)
    out = {"out": struct((B, N, H), q.dtype)}
    sums = {"mixed": struct((parts, B, N, H), jnp.dtype("float32"))}
    sums |= {name: struct((parts, B, N), jnp.dtype("float32")) for name in ("top", "total")}
    caches = {"new_k_cache": struct(k_cache.shape, k_cache.dtype), "new_v_cache": struct(v_cache.shape, v_cache.dtype)}
    length = pl.cdiv(S, parts * block) * block
    found = launch_named(
        functools.partial(_part_kernel, scale=scale, precision=precision, length=length, block=block),
        operands,
        (out if parts == 1 else sums) | caches,
        aliases={"k_cache": "new_k_cache", "v_cache": "new_v_cache"},
        grid=(B * K, parts),
        warps=4,
        stages=3,
        name="cached_attention",
        flops=2 * 2 * B * N * S * H,  # two products
        bytes_accessed=k_cache.nbytes + v_cache.nbytes + 2 * q.nbytes,
        interpret=interpret,
    )
    if parts > 1:
        found |= launch_named(
            _sum_kernel,
            {name: found[name] for name in sums},
            out,
            grid=(B * N,),
            warps=4 if parts > 8 else 1,
            name="cached_attention_sum",
            flops=2 * parts * B * N * H,
            interpret=interpret,
        )
    return found["out"], found["new_k_cache"], found["new_v_cache"]
