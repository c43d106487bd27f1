"""out[g] = lhs[rows of g].T @ dout[rows of g], as a Pallas kernel lowered through Triton."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.grouped_gemm_pallas import sum_over_rows
from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.schedule_pallas import schedule_groups
from jaxops._lib.tiling import panel_order
from jaxops._lib.traced_once import traced_once
from jaxops._lib.work_list import COLUMNS
from jaxops.ops.grouped_matmul.plan import Tiles


def _wgrad_kernel(groups_ref, lhs_ref, dout_ref, *refs, tiles: Tiles, precision: lax.Precision):
    *accumulator_ref, out_ref = refs
    G, K, N = out_ref.shape
    bm, bn = tiles.bm, tiles.bn
    num_i, num_j = pl.cdiv(K, bm), pl.cdiv(N, bn)
    rank = pl.program_id(0) // (num_i * num_j)
    i, j = panel_order(pl.program_id(0) % (num_i * num_j), num_i, num_j, tiles.panel)
    g, start, end = (plgpu.load(groups_ref.at[n * (groups_ref.shape[0] // COLUMNS) + rank]) for n in range(3))
    acc = sum_over_rows(
        lhs_ref,
        dout_ref,
        (start, end),
        i,
        j,
        sizes=(K, N),
        tile=(bm, bn, tiles.bk),
        peel=tiles.peel,
        precision=precision,
    )
    g = jnp.clip(g, 0, G - 1)  # a bound that the compiler can see, as in fwd_pallas.py
    i_in = None if K % bm == 0 else i * bm + jnp.arange(bm, dtype=jnp.int32) < K
    j_in = None if N % bn == 0 else j * bn + jnp.arange(bn, dtype=jnp.int32) < N

    place = g, pl.ds(i * bm, bm), pl.ds(j * bn, bn)
    mask = jnp.ones((bm, bn), jnp.bool_)
    mask = mask if i_in is None else mask & i_in[:, None]
    mask = mask if j_in is None else mask & j_in[None, :]
    if accumulator_ref:
        mask &= end > start  # an empty group leaves the accumulator as it is, to the bit
        acc += plgpu.load(accumulator_ref[0].at[place], mask=mask, other=0.0).astype(jnp.float32)
    plgpu.store(out_ref.at[place], acc.astype(out_ref.dtype), mask=mask)


@traced_once("tiles", "precision", "out_dtype", "interpret")
def wgrad_pallas(
    lhs, dout, accumulator, offsets, *, tiles: Tiles, precision: lax.Precision, out_dtype, interpret: bool
) -> jax.Array:
    """lhs[M, K], dout[M, N], accumulator[G, K, N] or None (aliased with the result), offsets[G + 1] -> [G, K, N] in out_dtype. No size is 0."""
    (M, K), N, G = lhs.shape, dout.shape[1], offsets.shape[0] - 1
    schedule = schedule_groups(offsets, M, interpret)
    return launch(
        functools.partial(_wgrad_kernel, tiles=tiles, precision=precision),
        schedule,
        lhs,
        dout,
        *([] if accumulator is None else [accumulator]),
        out=out_struct((G, K, N), out_dtype, like=lhs),
        grid=(G * pl.cdiv(K, tiles.bm) * pl.cdiv(N, tiles.bn),),
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
        name="grouped_matmul_wgrad",
        aliases={} if accumulator is None else {3: 0},
    )
