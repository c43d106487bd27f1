"""out[rows of g] = lhs[rows of g] @ (the matrix of g), each modality's with widths of its own, as a Pallas kernel lowered through Triton."""

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
from jaxops.ops.grouped_matmul import Tiles
from jaxops.ops.grouped_matmul.modalities import Part


def _fwd_kernel(
    tiles_ref,
    lhs_ref,
    *refs,
    parts: tuple[Part, ...],
    bound: int,
    tiles: Tiles,
    transpose_rhs: bool,
    precision: lax.Precision,
):
    rhs_refs, out_ref = refs[: len(parts)], refs[-1]
    M, N = out_ref.shape
    bm, bn = tiles.bm, tiles.bn
    t, j = panel_order(pl.program_id(0), bound, pl.cdiv(N, bn), tiles.panel)
    group, start, end = (plgpu.load(tiles_ref.at[i * (tiles_ref.shape[0] // COLUMNS) + t]) for i in range(3))
    j, start = (
        jnp.clip(j, 0, pl.cdiv(N, bn) - 1),
        jnp.clip(start, 0, M),
    )  # bounds that the compiler can see, as in grouped_matmul's kernel
    cols = j * bn + jnp.arange(bn, dtype=jnp.int32)

    def store(tile) -> None:
        height = tile.shape[0]
        stored = (start + jnp.arange(height, dtype=jnp.int32) < end)[:, None]
        stored = stored if N % bn == 0 else stored & (cols < N)[None, :]
        plgpu.store(
            out_ref.at[pl.ds(start, height), pl.ds(j * bn, bn)],
            tile.astype(out_ref.dtype),
            mask=jnp.broadcast_to(stored, (height, bn)),
        )

    def multiply(rhs_ref, first: int, width: int, height: int) -> None:
        g = jnp.clip(group - first, 0, rhs_ref.shape[0] - 1)
        tile = height, bn, tiles.bk
        acc = sum_over_columns(
            lhs_ref, rhs_ref, g, start, j, tile=tile, times=1, transpose_rhs=transpose_rhs, precision=precision
        )
        if width % bn and width < N:  # a row may hold NaN, and its columns past the modality's are zeros nevertheless
            acc = jnp.where((cols < width)[None, :], acc, 0)
        store(acc)

    product = jnp.zeros((), jnp.bool_)
    for part, rhs_ref in zip(parts, rhs_refs, strict=True):
        (first, last), width = part.groups, rhs_ref.shape[1 if transpose_rhs else 2]
        mine = (first <= group) & (group < last) & (j < pl.cdiv(width, bn))
        high = mine & (end - start > tiles.tail) if tiles.tail else mine
        pl.when(high)(functools.partial(multiply, rhs_ref, first, width, bm))
        if tiles.tail:
            pl.when(mine & ~high)(functools.partial(multiply, rhs_ref, first, width, tiles.tail))
        product |= mine
    pl.when(~product)(lambda: store(jnp.zeros((bm, bn), out_ref.dtype)))


@traced_once("parts", "out", "tiles", "transpose_rhs", "precision", "interpret")
def fwd_pallas(
    lhs,
    rhs,
    offsets,
    before,
    *,
    parts: tuple[Part, ...],
    out: jax.ShapeDtypeStruct,
    tiles: Tiles,
    transpose_rhs: bool,
    precision: lax.Precision,
    interpret: bool,
) -> jax.Array:
    """lhs[M, K], a rhs[G, K, N] ([G, N, K] with transpose_rhs) of each part, offsets of all groups -> an array as `out`, of which the parts' rows are
    written: where `before` is given, in its memory. No size is 0."""
    (M, width), G = out.shape, offsets.shape[0] - 1
    schedule = schedule_rows(offsets, M, tiles.bm, interpret, tuple(part.runs for part in parts))
    bound = tile_bound(M, G, tiles.bm)
    operands = (schedule, lhs, *rhs, *([] if before is None else [before]))
    return launch(
        functools.partial(
            _fwd_kernel, parts=parts, bound=bound, tiles=tiles, transpose_rhs=transpose_rhs, precision=precision
        ),
        *operands,
        out=out_struct(out.shape, out.dtype, like=lhs),
        grid=(bound * pl.cdiv(width, tiles.bn),),
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
        name="modality_grouped_matmul_dgrad" if transpose_rhs else "modality_grouped_matmul_fwd",
        aliases={} if before is None else {len(operands) - 1: 0},
    )
