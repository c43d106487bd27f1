"""The forward (Pallas on Triton), with an online softmax. A program owns a block of query rows of one head and loops
over the blocks of keys that they see."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.pallas.masked_pallas import store
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.packed_attention.blocks_pallas import (
    LOG2_E,
    launch,
    load_rows,
    over_keys,
    own_queries,
    padded,
    scores_of,
    store_rows,
)
from jaxops.ops.packed_attention.plan import Arrays, Spec, Tiles
from jaxops.ops.packed_attention.xla import exact_lse

NONE = float(jnp.finfo(jnp.float32).min)  # the largest score before the first one: with -inf, rows without keys are NaN


def _fwd_kernel(ref: dict, *, spec: Spec, tiles: Tiles):
    T, S, bq = ref["q"].shape[0], ref["k"].shape[0], tiles.bq
    queries, head, kv_head = own_queries(ref, bq)
    q = load_rows(ref["q"], queries.rows, head, queries.inside)

    def step(keys, keys_in, mask, carry):
        mixed, top, total = carry
        k = load_rows(ref["k"], keys, kv_head, keys_in)
        scores, _ = scores_of(spec, q, k)
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        p, before = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
        v = load_rows(ref["v"], keys, kv_head, keys_in)
        mixed = before[:, None] * mixed + plgpu.dot(p.astype(v.dtype), v, precision=spec.precision)
        return mixed, new_top, before * total + jnp.sum(p, axis=1)

    none = jnp.zeros((bq, padded(ref["v"])), jnp.float32)
    before = none, jnp.full((bq,), NONE, jnp.float32), jnp.zeros((bq,), jnp.float32)
    if "sinks" in ref:  # each has an exponential and no value
        sink = LOG2_E * plgpu.load(ref["sinks"].at[jnp.broadcast_to(head, (bq,))])
        before = none, jnp.maximum(sink, NONE), jnp.ones((bq,), jnp.float32)
    mixed, top, total = over_keys(queries, tiles.bk, S, step, before)
    total = jnp.where(queries.sees, total, 1.0)
    store_rows(ref["out"], queries.rows, head, jnp.where(queries.sees[:, None], mixed / total[:, None], 0.0))
    if "lse" in ref:
        lse = jnp.where(queries.sees, exact_lse(top + jnp.log2(total), LOG2_E), 0.0)
        store(ref["lse"], (jnp.broadcast_to(head, (bq,)), queries.rows), lse, queries.rows < T)


@traced_once("spec", "tiles", "save", "interpret")
def forward_pallas(spec: Spec, tiles: Tiles, arrays: Arrays, *, save: bool, interpret: bool) -> tuple[jax.Array, ...]:
    """(out [T, N, V],), and with `save` lse float32 [N, T]: of each row, the base 2 logarithm of the sum of
    exponentials. No size is 0."""
    q = arrays.q
    T, N, _ = q.shape
    out = {"out": out_struct((T, N, arrays.v.shape[2]), q.dtype, like=q)}
    out |= {"lse": out_struct((N, T), jnp.dtype("float32"), like=q)} if save else {}
    options: dict[str, Any] = {"blocks": pl.cdiv(T, tiles.bq), "heads": N, "products": (1, 1), "interpret": interpret}
    return tuple(launch(_fwd_kernel, "fwd", spec, tiles, arrays._asdict(), out, **options).values())
