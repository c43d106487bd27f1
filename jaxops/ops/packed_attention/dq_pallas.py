"""The gradient of the queries: as the forward, with the probabilities found again from its logarithms of sums (Pallas
on Triton)."""

import functools

import jax
import jax.numpy as jnp
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
    over_keys,
    store_rows,
)
from jaxops.ops.packed_attention.plan import Arrays, Spec, Tiles


def _dq_kernel(ref: dict, *, spec: Spec, tiles: Tiles):
    (T, N, _), (S, K, _), bq = ref["q"].shape, ref["k"].shape, tiles.bq
    blocks = pl.cdiv(T, bq)
    i, head = pl.program_id(0) % blocks, pl.program_id(0) // blocks
    queries, kv_head = Queries.of(ref, load_inside(ref), i, bq), head // (N // K)
    q, dout = (load_rows(ref[name], queries.rows, head, queries.inside) for name in ("q", "dout"))
    lse, along = (load_of_head(ref[name], head, queries.rows, queries.inside) for name in ("lse", "along"))

    def step(keys, keys_in, mask, dq):
        k = load_rows(ref["k"], keys, kv_head, keys_in)
        scores = spec.scale * LOG2_E * plgpu.dot(q, k, trans_b=True, precision=spec.precision)
        p = jnp.exp2(scores - lse[:, None])
        p = p if mask is None else jnp.where(mask, p, 0.0)
        v = load_rows(ref["v"], keys, kv_head, keys_in)
        ds = p * (plgpu.dot(dout, v, trans_b=True, precision=spec.precision) - along[:, None])
        return dq + plgpu.dot(ds.astype(k.dtype), k, precision=spec.precision)

    dq = over_keys(queries, tiles.bk, S, step, jnp.zeros(q.shape, jnp.float32))
    store_rows(ref["dq"], queries.rows, head, jnp.where(queries.sees[:, None], spec.scale * dq, 0.0))


@traced_once("spec", "tiles", "interpret")
def dq_pallas(
    spec: Spec, tiles: Tiles, arrays: Arrays, dout: jax.Array, lse: jax.Array, along: jax.Array, *, interpret: bool
) -> jax.Array:
    """[T, N, H] in q's dtype. No size is 0.

    Args:
      dout: [T, N, H].
      lse: [N, T], the forward's.
      along: [N, T] float32, the sum of out * dout over each row.
    """
    T, N, H = arrays.q.shape
    return launch_named(
        functools.partial(_dq_kernel, spec=spec, tiles=tiles),
        arrays._asdict() | {"dout": dout, "lse": lse, "along": along},
        {"dq": out_struct((T, N, H), arrays.q.dtype, like=arrays.q)},
        grid=(pl.cdiv(T, tiles.bq) * N,),
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
        name="packed_attention_dq",
        flops=3 * 2 * spec.pairs * N * H,  # three products
    )["dq"]
