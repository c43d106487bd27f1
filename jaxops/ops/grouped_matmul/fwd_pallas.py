"""out[rows of g] = lhs[rows of g] @ rhs[g], as a Pallas kernel lowered through Triton. With transpose_rhs it is dgrad."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.grouped_gemm_pallas import sum_over_columns
from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.schedule_pallas import schedule_rows
from jaxops._lib.tiling import panel_order, tile_bound
from jaxops._lib.traced_once import traced_once
from jaxops._lib.work_list import COLUMNS
from jaxops.ops.grouped_matmul.plan import Tiles


def _fwd_kernel(
    tiles_ref, lhs_ref, rhs_ref, *refs, G: int, tiles: Tiles, transpose_rhs: bool, precision: lax.Precision
):
    *bias_ref, out_ref = refs
    M, N = out_ref.shape
    bm, bn = tiles.bm, tiles.bn
    t, j = panel_order(pl.program_id(0), tile_bound(M, G, bm), pl.cdiv(N, bn), tiles.panel)
    group, start, end = (plgpu.load(tiles_ref.at[i * (tiles_ref.shape[0] // COLUMNS) + t]) for i in range(3))
    inside = group < G
    any_step = inside.astype(
        jnp.int32
    )  # rows outside the groups take no step and are stored as the zeros that they start from
    # Bounds that the compiler can see: they hold already, but where it knows that no int32 offset overflows it steps 64-bit pointers instead of
    # widening every offset in every step (H200, 2026-11-21, mixtral_up: 669 against 612 TFLOP/s).
    g, j, start = jnp.clip(group, 0, G - 1), jnp.clip(j, 0, pl.cdiv(N, bn) - 1), jnp.clip(start, 0, M)
    cols = j * bn + jnp.arange(bn, dtype=jnp.int32)
    cols_in = None if N % bn == 0 else cols < N

    def multiply(height: int) -> None:
        """Rows start to end, at most `height` of them, times one block of columns."""
        tile = height, bn, tiles.bk
        acc = sum_over_columns(
            lhs_ref, rhs_ref, g, start, j, tile=tile, times=any_step, transpose_rhs=transpose_rhs, precision=precision
        )
        if bias_ref:
            acc += plgpu.load(bias_ref[0].at[g, pl.ds(j * bn, bn)], mask=(cols < N) & inside, other=0.0).astype(
                jnp.float32
            )[None, :]
        stored = start + jnp.arange(height, dtype=jnp.int32) < end
        stored = stored[:, None] if cols_in is None else stored[:, None] & cols_in[None, :]
        plgpu.store(
            out_ref.at[pl.ds(start, height), pl.ds(j * bn, bn)],
            acc.astype(out_ref.dtype),
            mask=jnp.broadcast_to(stored, (height, bn)),
        )

    if tiles.tail:
        short = end - start <= tiles.tail
        pl.when(jnp.logical_not(short))(lambda: multiply(bm))
        pl.when(short)(lambda: multiply(tiles.tail))
    else:
        multiply(bm)


@traced_once("tiles", "transpose_rhs", "precision", "out_dtype", "interpret")
def fwd_pallas(
    lhs, rhs, bias, offsets, *, tiles: Tiles, transpose_rhs: bool, precision: lax.Precision, out_dtype, interpret: bool
) -> jax.Array:
    """lhs[M, K], rhs[G, K, N] ([G, N, K] with transpose_rhs), bias[G, N] or None, offsets[G + 1] -> [M, N] in out_dtype. No size is 0."""
    M = lhs.shape[0]
    G, N = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    schedule = schedule_rows(offsets, M, tiles.bm, interpret)
    return launch(
        functools.partial(_fwd_kernel, G=G, tiles=tiles, transpose_rhs=transpose_rhs, precision=precision),
        schedule,
        lhs,
        rhs,
        *([] if bias is None else [bias]),
        out=out_struct((M, N), out_dtype, like=lhs),
        grid=(tile_bound(M, G, tiles.bm) * pl.cdiv(N, tiles.bn),),
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
        name="grouped_matmul_dgrad" if transpose_rhs else "grouped_matmul_fwd",
    )
