"""out[g] = lhs[rows of g].T @ dout[rows of g], as a Pallas kernel lowered through Triton."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.manual_axes import out_struct
from jaxops._lib.schedule_pallas import COLUMNS, schedule_groups
from jaxops._lib.tiling import panel_order
from jaxops.ops.grouped_matmul.plan import Tiles


def _wgrad_kernel(groups_ref, lhs_ref, dout_ref, *refs, tiles: Tiles, precision: lax.Precision):
    *accumulator_ref, out_ref = refs
    M = lhs_ref.shape[0]
    G, K, N = out_ref.shape
    bm, bn, bk = tiles.bm, tiles.bn, tiles.bk
    num_i, num_j = pl.cdiv(K, bm), pl.cdiv(N, bn)
    rank = pl.program_id(0) // (num_i * num_j)
    i, j = panel_order(pl.program_id(0) % (num_i * num_j), num_i, num_j, tiles.panel)
    g, start, end = (plgpu.load(groups_ref.at[n * (groups_ref.shape[0] // COLUMNS) + rank]) for n in range(3))
    # Bounds that the compiler can see, as in fwd_pallas.py. They hold already, but for an empty group at M, which takes no step.
    steps = jnp.clip((end - start + bk - 1) // bk, 0, pl.cdiv(M, bk))
    whole = jnp.clip((end - start) // bk, 0, M // bk)
    g, start = jnp.clip(g, 0, G - 1), jnp.clip(start, 0, M - 1)
    i_in = None if K % bm == 0 else i * bm + jnp.arange(bm, dtype=jnp.int32) < K
    j_in = None if N % bn == 0 else j * bn + jnp.arange(bn, dtype=jnp.int32) < N

    def step(s, acc, rows_in=None):
        def load(ref, first, cols_in, width):
            mask = None if rows_in is None else jnp.broadcast_to(rows_in[:, None], (bk, width))
            if cols_in is not None:
                mask = jnp.broadcast_to(cols_in[None, :], (bk, width)) if mask is None else mask & cols_in[None, :]
            return plgpu.load(ref.at[pl.ds(start + s * bk, bk), pl.ds(first, width)], mask=mask, other=None if mask is None else 0.0)

        a, b = load(lhs_ref, i * bm, i_in, bm), load(dout_ref, j * bn, j_in, bn)
        return acc + plgpu.dot(a, b, trans_a=True, precision=precision)

    def masked_step(s, acc):  # a neighbour's rows may be NaN: they are masked on both sides
        return step(s, acc, start + s * bk + jnp.arange(bk, dtype=jnp.int32) < end)

    acc = jnp.zeros((bm, bn), jnp.float32)
    if tiles.peel:
        acc = lax.fori_loop(0, whole, step, acc)
        acc = lax.cond(steps > whole, functools.partial(masked_step, whole), lambda acc: acc, acc)
    else:
        acc = lax.fori_loop(0, steps, masked_step, acc)

    place = g, pl.ds(i * bm, bm), pl.ds(j * bn, bn)
    mask = jnp.ones((bm, bn), jnp.bool_)
    mask = mask if i_in is None else mask & i_in[:, None]
    mask = mask if j_in is None else mask & j_in[None, :]
    if accumulator_ref:
        mask &= end > start  # an empty group leaves the accumulator as it is, to the bit
        acc += plgpu.load(accumulator_ref[0].at[place], mask=mask, other=0.0).astype(jnp.float32)
    plgpu.store(out_ref.at[place], acc.astype(out_ref.dtype), mask=mask)


def wgrad_pallas(lhs, dout, accumulator, offsets, *, tiles: Tiles, precision: lax.Precision, out_dtype, interpret: bool) -> jax.Array:
    """lhs[M, K], dout[M, N], accumulator[G, K, N] or None (aliased with the result), offsets[G + 1] -> [G, K, N] in out_dtype. No size is 0."""
    (M, K), N, G = lhs.shape, dout.shape[1], offsets.shape[0] - 1
    schedule = schedule_groups(offsets, M, interpret)
    return pl.pallas_call(
        functools.partial(_wgrad_kernel, tiles=tiles, precision=precision),
        out_shape=out_struct((G, K, N), out_dtype, like=lhs),
        grid=(G * pl.cdiv(K, tiles.bm) * pl.cdiv(N, tiles.bn),),
        input_output_aliases={} if accumulator is None else {3: 0},
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="grouped_matmul_wgrad",
    )(schedule, lhs, dout, *([] if accumulator is None else [accumulator]))
