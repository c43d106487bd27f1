"""The backward (Pallas on Triton). In dq a program owns a block of query rows of one head, as in the forward. In dkv it
owns a block of keys of one head and loops over the blocks of queries, of all heads that share it, that see some of it:
deterministic, without atomics."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.packed_attention.blocks_pallas import (
    Queries,
    launch,
    load_inside,
    load_of_head,
    load_rows,
    over_keys,
    own_queries,
    scores_of,
    store_rows,
)
from jaxops.ops.packed_attention.plan import Arrays, Spec, Tiles
from jaxops.ops.packed_attention.visible import blocks_that_see
from jaxops.ops.packed_attention.xla import along_rows


def _dq_kernel(ref: dict, *, spec: Spec, tiles: Tiles):
    queries, head, kv_head = own_queries(ref, tiles.bq)
    q, dout = (load_rows(ref[name], queries.rows, head, queries.inside) for name in ("q", "dout"))
    lse, along = (load_of_head(ref[name], head, queries.rows, queries.inside) for name in ("lse", "along"))

    def step(keys, keys_in, mask, dq):
        k = load_rows(ref["k"], keys, kv_head, keys_in)
        scores, slope = scores_of(spec, q, k)
        p = jnp.exp2(scores - lse[:, None])
        p = p if mask is None else jnp.where(mask, p, 0.0)
        v = load_rows(ref["v"], keys, kv_head, keys_in)
        ds = slope * p * (plgpu.dot(dout, v, trans_b=True, precision=spec.precision) - along[:, None])
        return dq + plgpu.dot(ds.astype(k.dtype), k, precision=spec.precision)

    dq = over_keys(queries, tiles.bk, ref["k"].shape[0], step, jnp.zeros(q.shape, jnp.float32))
    store_rows(ref["dq"], queries.rows, head, jnp.where(queries.sees[:, None], spec.scale * dq, 0.0))


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
        scores, slope = scores_of(spec, k, q)
        mask = queries.mask(keys[:, None])
        # Masked once more below: keys outside may be NaN, and so are their scores and their products with dout.
        p = jnp.where(mask, jnp.exp2(scores - lse[None, :]), 0.0)
        ds = slope * p * (plgpu.dot(v, dout, trans_b=True, precision=spec.precision) - along[None, :])
        ds = jnp.where(mask, ds, 0.0)
        return (
            dk + plgpu.dot(ds.astype(q.dtype), q, precision=spec.precision),
            dv + plgpu.dot(p.astype(dout.dtype), dout, precision=spec.precision),
        )

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    dk, dv = lax.fori_loop(0, jnp.maximum(end - first, 0) * shared, step, zeros)
    store_rows(ref["dk"], keys, kv_head, spec.scale * dk)
    store_rows(ref["dv"], keys, kv_head, dv)


@traced_once("spec", "dq", "dkv", "interpret")
def backward_pallas(
    spec: Spec, dq: Tiles, dkv: Tiles, arrays: Arrays, out: jax.Array, lse: jax.Array, dout: jax.Array, *,
    interpret: bool,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """dq, dk, dv in the dtypes of q, k and v. out and lse are the forward's. No size is 0."""
    q, k, v = arrays[:3]
    (T, N, _), (S, K, _) = q.shape, k.shape
    options = {"interpret": interpret}
    operands = arrays._asdict() | {"dout": dout, "lse": lse, "along": along_rows(arrays, out, dout)}
    results = {"dq": out_struct(q.shape, q.dtype, like=q)}
    blocks = {"blocks": pl.cdiv(T, dq.bq), "heads": N, "products": (2, 1)}
    gradients = launch(_dq_kernel, "dq", spec, dq, operands, results, **blocks, **options)
    seen = blocks_that_see(arrays.first, arrays.end, S=S, bq=dkv.bq, bk=dkv.bk)
    results = {name: out_struct(x.shape, x.dtype, like=x) for name, x in (("dk", k), ("dv", v))}
    blocks = {"blocks": pl.cdiv(S, dkv.bk), "heads": K, "products": (2, 2)}
    operands |= {"blocks": seen.ravel()}
    gradients |= launch(_dkv_kernel, "dkv", spec, dkv, operands, results, **blocks, **options)
    return gradients["dq"], gradients["dk"], gradients["dv"]
