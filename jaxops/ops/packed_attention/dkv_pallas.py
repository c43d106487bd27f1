"""The gradients of keys and values: a program owns a block of keys of one head and loops over the blocks of queries, of
all heads that share it, that see some of it: deterministic, without atomics (Pallas on Triton)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.packed_attention.blocks_pallas import (
    LOG2_E,
    Queries,
    load_inside,
    load_of_head,
    load_rows,
    store_rows,
)
from jaxops.ops.packed_attention.plan import Arrays, Spec, Tiles
from jaxops.ops.packed_attention.visible import blocks_that_see


def _dkv_kernel(ref: dict, *, spec: Spec, tiles: Tiles):
    (_, N, _), (S, K, _), bk = ref["q"].shape, ref["k"].shape, tiles.bk
    blocks, shared = pl.cdiv(S, bk), N // K
    j, kv_head = pl.program_id(0) % blocks, pl.program_id(0) // blocks
    keys = j * bk + jnp.arange(bk, dtype=jnp.int32)
    k, v = (load_rows(ref[name], keys, kv_head, keys < S) for name in ("k", "v"))
    first, end = (plgpu.load(ref["blocks"].at[n * blocks + j]) for n in range(2))

    inside = load_inside(ref)

    def step(n, carry):
        dk, dv = carry
        # Not % and //, whose corrections for signs do not lower for a loop's counter.
        head = kv_head * shared + lax.rem(n, jnp.int32(shared))
        queries = Queries.of(ref, inside, first + lax.div(n, jnp.int32(shared)), tiles.bq)
        q, dout = (load_rows(ref[name], queries.rows, head, queries.inside) for name in ("q", "dout"))
        lse, along = (load_of_head(ref[name], head, queries.rows, queries.inside) for name in ("lse", "along"))
        # Transposed, [bk, bq]: so the probabilities are the left operand as they are.
        scores = spec.scale * LOG2_E * plgpu.dot(k, q, trans_b=True, precision=spec.precision)
        mask = queries.mask(keys[:, None])
        # Masked once more below: keys outside may be NaN, and so are their scores and their products with dout.
        p = jnp.where(mask, jnp.exp2(scores - lse[None, :]), 0.0)
        ds = p * (plgpu.dot(v, dout, trans_b=True, precision=spec.precision) - along[None, :])
        ds = jnp.where(mask, ds, 0.0)
        return (
            dk + plgpu.dot(ds.astype(q.dtype), q, precision=spec.precision),
            dv + plgpu.dot(p.astype(dout.dtype), dout, precision=spec.precision),
        )

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, jnp.maximum(end - first, 0) * shared, step, (zeros, zeros))
    store_rows(ref["dk"], keys, kv_head, spec.scale * dk)
    store_rows(ref["dv"], keys, kv_head, dv)


@traced_once("spec", "tiles", "interpret")
def dkv_pallas(
    spec: Spec, tiles: Tiles, arrays: Arrays, dout: jax.Array, lse: jax.Array, along: jax.Array, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """dk, dv [S, K, H] in the dtype of k and v; the other arguments are `dq_pallas`'s. No size is 0."""
    (_, N, H), (S, K, _) = arrays.q.shape, arrays.k.shape
    seen = blocks_that_see(arrays.first, arrays.end, S=S, bq=tiles.bq, bk=tiles.bk)
    like = out_struct((S, K, H), arrays.k.dtype, like=arrays.k)
    gradients = launch_named(
        functools.partial(_dkv_kernel, spec=spec, tiles=tiles),
        arrays._asdict() | {"dout": dout, "lse": lse, "along": along, "blocks": seen.ravel()},
        {"dk": like, "dv": like},
        grid=(pl.cdiv(S, tiles.bk) * K,),
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
        name="packed_attention_dkv",
        flops=4 * 2 * spec.pairs * N * H,  # four products
    )
    return gradients["dk"], gradients["dv"]
