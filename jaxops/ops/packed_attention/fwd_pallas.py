"""The forward: a program owns a block of query rows of one head and loops over the blocks of keys that they see, with
an online softmax (Pallas on Triton)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.pallas.masked_pallas import store
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.packed_attention.blocks_pallas import (
    LOG2_E,
    NONE,
    Queries,
    load_inside,
    load_rows,
    over_keys,
    store_rows,
)
from jaxops.ops.packed_attention.plan import Arrays, Spec, Tiles
from jaxops.ops.packed_attention.xla import exact_lse


def _fwd_kernel(ref: dict, *, spec: Spec, tiles: Tiles):
    (T, N, _), (S, K, _), bq = ref["q"].shape, ref["k"].shape, tiles.bq
    blocks = pl.cdiv(T, bq)
    i, head = pl.program_id(0) % blocks, pl.program_id(0) // blocks
    queries, kv_head = Queries.of(ref, load_inside(ref), i, bq), head // (N // K)
    q = load_rows(ref["q"], queries.rows, head, queries.inside)

    def step(keys, keys_in, mask, carry):
        mixed, top, total = carry
        k = load_rows(ref["k"], keys, kv_head, keys_in)
        scores = spec.scale * LOG2_E * plgpu.dot(q, k, trans_b=True, precision=spec.precision)
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        p, before = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
        v = load_rows(ref["v"], keys, kv_head, keys_in)
        mixed = before[:, None] * mixed + plgpu.dot(p.astype(v.dtype), v, precision=spec.precision)
        return mixed, new_top, before * total + jnp.sum(p, axis=1)

    none = jnp.zeros(q.shape, jnp.float32), jnp.full((bq,), NONE, jnp.float32), jnp.zeros((bq,), jnp.float32)
    mixed, top, total = over_keys(queries, tiles.bk, S, step, none)
    total = jnp.where(queries.sees, total, 1.0)
    store_rows(ref["out"], queries.rows, head, jnp.where(queries.sees[:, None], mixed / total[:, None], 0.0))
    if "lse" in ref:
        lse = jnp.where(queries.sees, exact_lse(top + jnp.log2(total), LOG2_E), 0.0)
        store(ref["lse"], (jnp.broadcast_to(head, (bq,)), queries.rows), lse, queries.rows < T)


@traced_once("spec", "tiles", "save", "interpret")
def forward_pallas(spec: Spec, tiles: Tiles, arrays: Arrays, *, save: bool, interpret: bool) -> tuple[jax.Array, ...]:
    """(out [T, N, H],), and with `save` lse float32 [N, T]: of each row, the base 2 logarithm of the sum of
    exponentials. No size is 0."""
    T, N, H = arrays.q.shape
    struct = functools.partial(out_struct, like=arrays.q)
    out = {"out": struct((T, N, H), arrays.q.dtype)} | ({"lse": struct((N, T), jnp.dtype("float32"))} if save else {})
    results = launch_named(
        functools.partial(_fwd_kernel, spec=spec, tiles=tiles),
        arrays._asdict(),
        out,
        grid=(pl.cdiv(T, tiles.bq) * N,),
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
        name="packed_attention_fwd",
        flops=2 * 2 * spec.pairs * N * H,  # two products
    )
    return tuple(results.values())
