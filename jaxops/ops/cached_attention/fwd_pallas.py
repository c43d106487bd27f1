"""Attention of one token a row to its cache (Pallas on Triton): a program owns an equal part of the tokens that a row
sees, and the queries that share its keys, which it normalizes and rotates itself; a second kernel adds the parts."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.pallas.masked_pallas import load, store
from jaxops._lib.planning.costs import bytes_of
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.cached_attention.plan import FEWEST, Tiles
from jaxops.ops.cached_attention.xla import Options

LOG2_E = math.log2(math.e)  # the GPU has 2 ** x, not e ** x
NONE = -3e38  # a part's largest score before its first one: with -inf, a part without tokens would be NaN


def _heads(ref: dict, b: jax.Array, head: jax.Array, inside: jax.Array, weight: str, epsilon: float) -> jax.Array:
    """Row b's heads [rows], normalized and rotated, float32 [rows, head_dim up to a power of 2].

    Args:
      inside: bool [rows]; heads where it does not hold are zeros, and are not read.
      weight: the ref of the norm's weight; without it there is no norm.
    """
    H = ref["qkv"].shape[2]
    column = jnp.arange(max(FEWEST, power_of_2(H)), dtype=jnp.int32)

    def read(column: jax.Array, column_in: jax.Array) -> jax.Array:
        mask = inside[:, None] & column_in[None, :]
        return load(ref["qkv"], (b, head[:, None], column[None, :]), mask).astype(jnp.float32)

    def scaled(x: jax.Array, column: jax.Array, column_in: jax.Array) -> jax.Array:
        if weight not in ref:
            return x
        return x * factor * load(ref[weight], (column,), column_in)[None, :]

    x = read(column, column < H)
    factor = lax.rsqrt(jnp.sum(x * x, axis=1) * (1 / H) + epsilon)[:, None]
    x = scaled(x, column, column < H)
    if "cos" in ref:
        half = ref["cos"].shape[1]
        rotary, first = column < 2 * half, column < half
        partner, angle = jnp.where(first, column + half, column - half), jnp.where(first, column, column - half)
        other = scaled(read(partner, rotary), partner, rotary)
        cos, sin = (load(ref[name], (b, angle), rotary)[None, :] for name in ("cos", "sin"))
        x = jnp.where(rotary[None, :], x * cos + jnp.where(first[None, :], -sin, sin) * other, x)
    return jnp.where(inside[:, None], x, 0.0)


def _part_kernel(ref: dict, *, options: Options, parts: int, block: int):
    """Scores are in powers of 2. Part 0 begins with the token itself, and with the sinks."""
    _, K, S, H = ref["k_cache"].shape
    N, dtype = ref["qkv"].shape[1] - 2 * K, ref["k_cache"].dtype
    group = N // K
    heads, columns = max(FEWEST, power_of_2(group)), max(FEWEST, power_of_2(H))
    b, kv_head, part = pl.program_id(0) // K, pl.program_id(0) % K, pl.program_id(1)
    row, column = jnp.arange(heads, dtype=jnp.int32), jnp.arange(columns, dtype=jnp.int32)
    at, first = plgpu.load(ref["at"].at[b]), plgpu.load(ref["first"].at[b])
    inside, head, column_in = (at >= 0) & (at < S), kv_head * group + row, column < H
    heads_of = functools.partial(_heads, ref, b, epsilon=options.epsilon)
    mine = (row < group) & inside
    q = heads_of(head, mine, "q_weight").astype(dtype)
    # Every row of these is the same head.
    same, every = jnp.broadcast_to(N + kv_head, (heads,)), jnp.broadcast_to(inside, (heads,))
    k = heads_of(same, every, "k_weight").astype(dtype)
    v = load(ref["qkv"], (b, (same + K)[:, None], column[None, :]), every[:, None] & column_in[None, :]).astype(dtype)

    own = options.scale * LOG2_E * jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=1)
    top, total = own, jnp.ones((heads,), jnp.float32)
    if "sinks" in ref:
        sinks = load(ref["sinks"], (head,), mine)
        sinks = jnp.where(sinks == jnp.inf, sinks, jnp.minimum(LOG2_E * sinks, -NONE))
        top = jnp.maximum(own, sinks)
        total = jnp.exp2(own - top) + jnp.exp2(sinks - top)
    mixed = jnp.exp2(own - top)[:, None] * v.astype(jnp.float32)
    begins = jnp.broadcast_to(part == 0, (heads,))
    start = (
        jnp.where(begins[:, None], mixed, 0.0),
        jnp.where(begins, top, NONE),
        jnp.where(begins, total, 0.0),
    )

    def dot(a, b, **more):
        return plgpu.dot(a.astype(options.compute), b.astype(options.compute), precision=options.precision, **more)

    def step(i, carry):
        mixed, top, total = carry
        token = begin + i * block + jnp.arange(block, dtype=jnp.int32)
        seen = token < at
        k, v = (
            load(ref[name], (b, kv_head, token[:, None], column[None, :]), seen[:, None] & column_in[None, :])
            for name in ("k_cache", "v_cache")
        )
        scores = options.scale * LOG2_E * dot(q, k, trans_b=True)
        scores = jnp.where(seen[None, :], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        p, before = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
        mixed = before[:, None] * mixed + dot(p, v)
        return mixed, new_top, before * total + jnp.sum(p, axis=1)

    blocks = jnp.where(inside, (at - first + block - 1) // block, 0)
    each = (blocks + parts - 1) // parts
    begin = first + part * each * block
    mixed, top, total = lax.fori_loop(0, jnp.clip(blocks - part * each, 0, each), step, start)

    mask = (row < group)[:, None] & column_in[None, :]
    if "out" in ref:  # there is one part
        store(ref["out"], (b, head[:, None], column[None, :]), mixed / total[:, None], mask)
    else:
        store(ref["mixed"], (part, b, head[:, None], column[None, :]), mixed, mask)
        store(ref["top"], (part, b, head), top, row < group)
        store(ref["total"], (part, b, head), total, row < group)
    # No program reads this place of the cache.
    written = column_in & inside & (part == 0)
    for name, x in (("new_k_cache", k), ("new_v_cache", v)):
        store(ref[name], (b, kv_head, at, column), jnp.max(x.astype(jnp.float32), axis=0), written)


def _sum_kernel(ref: dict):
    """A program's head of a row."""
    parts, _, N, H = ref["mixed"].shape
    b, head = pl.program_id(0) // N, pl.program_id(0) % N
    n, column = jnp.arange(power_of_2(parts), dtype=jnp.int32), jnp.arange(power_of_2(H), dtype=jnp.int32)
    top, total = (load(ref[name], (n, b, head), n < parts) for name in ("top", "total"))
    mixed = load(ref["mixed"], (n[:, None], b, head, column[None, :]), (n < parts)[:, None] & (column < H)[None, :])
    top = jnp.where(n < parts, top, NONE)
    share = jnp.exp2(top - jnp.max(top))
    share = share / jnp.sum(share * total)
    store(ref["out"], (b, head, column), jnp.sum(share[:, None] * mixed, axis=0), column < H)


@traced_once("tiles", "options", "interpret")
def cached_pallas(
    tiles: Tiles, options: Options, operands: dict, *, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out [B, N, H], the caches), which are written in place where the given ones are used no more. No size is 0.

    Args:
      operands: qkv, k_cache, v_cache, at; float32 sinks, q_weight, k_weight, cos and sin, or None.
    """
    qkv, k_cache, v_cache, at = (operands[name] for name in ("qkv", "k_cache", "v_cache", "at"))
    B, K, S, H = k_cache.shape
    N = qkv.shape[1] - 2 * K
    seen = options.seen(S)
    parts = min(tiles.parts, pl.cdiv(seen, tiles.block))
    struct = functools.partial(out_struct, like=qkv)
    out = {"out": struct((B, N, H), qkv.dtype)}
    sums = {"mixed": struct((parts, B, N, H), jnp.dtype("float32"))}
    sums |= {name: struct((parts, B, N), jnp.dtype("float32")) for name in ("top", "total")}
    caches = {"new_k_cache": struct(k_cache.shape, k_cache.dtype), "new_v_cache": struct(v_cache.shape, v_cache.dtype)}
    first = jnp.zeros_like(at) if options.window is None else jnp.maximum(at - options.window, 0)
    results = launch_named(
        functools.partial(_part_kernel, options=options, parts=parts, block=tiles.block),
        operands | {"first": first},
        (out if parts == 1 else sums) | caches,
        aliases={"k_cache": "new_k_cache", "v_cache": "new_v_cache"},
        grid=(B * K, parts),
        warps=tiles.warps,
        stages=tiles.stages,
        name="cached_attention",
        flops=2 * 2 * B * N * seen * H,  # two products
        bytes_accessed=2 * B * K * seen * H * k_cache.dtype.itemsize + bytes_of(qkv, out["out"]),
        interpret=interpret,
    )
    if parts > 1:
        results |= launch_named(
            _sum_kernel,
            {name: results[name] for name in sums},
            out,
            grid=(B * N,),
            warps=8 if parts > 64 else 4 if parts > 8 else 1,
            name="cached_attention_sum",
            flops=2 * parts * B * N * H,
            interpret=interpret,
        )
    return results["out"], results["new_k_cache"], results["new_v_cache"]
