"""(the gradient of the matrix of g) = lhs[rows of g].T @ dout[rows of g], each modality's with widths of its own, as a Pallas kernel lowered through Triton."""

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
from jaxops.ops.grouped_matmul import Tiles
from jaxops.ops.grouped_matmul.modalities import Part, Shapes, first_groups


def _tiles_of(shape: tuple[int, int, int], tiles: Tiles) -> tuple[int, int]:
    """Of one matrix: rows and columns of tiles."""
    return pl.cdiv(shape[1], tiles.bm), pl.cdiv(shape[2], tiles.bn)


def _wgrad_kernel(
    groups_ref, lhs_ref, dout_ref, *out_refs, parts: tuple[Part, ...], tiles: Tiles, precision: lax.Precision
):
    bm, bn = tiles.bm, tiles.bn

    def multiply(out_ref, first: int, number) -> None:
        """A tile of a matrix of the part whose groups start at `first`, by its number among the part's tiles."""
        G, K, N = out_ref.shape
        num_i, num_j = _tiles_of(out_ref.shape, tiles)
        i, j = panel_order(number % (num_i * num_j), num_i, num_j, tiles.panel)
        rank = first + number // (num_i * num_j)
        group, start, end = (plgpu.load(groups_ref.at[n * (groups_ref.shape[0] // COLUMNS) + rank]) for n in range(3))
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
        there = (i * bm + jnp.arange(bm, dtype=jnp.int32) < K)[:, None] & (
            j * bn + jnp.arange(bn, dtype=jnp.int32) < N
        )[None, :]
        place = jnp.clip(group - first, 0, G - 1), pl.ds(i * bm, bm), pl.ds(j * bn, bn)
        plgpu.store(out_ref.at[place], acc.astype(out_ref.dtype), mask=there)

    before = 0
    for part, out_ref in zip(parts, out_refs, strict=True):
        num_i, num_j = _tiles_of(out_ref.shape, tiles)
        number = pl.program_id(0) - before
        count = out_ref.shape[0] * num_i * num_j
        pl.when((number >= 0) & (number < count))(functools.partial(multiply, out_ref, part.groups[0], number))
        before += count


@traced_once("parts", "shapes", "tiles", "precision", "out_dtype", "interpret")
def wgrad_pallas(
    lhs,
    dout,
    offsets,
    *,
    parts: tuple[Part, ...],
    shapes: Shapes,
    tiles: Tiles,
    precision: lax.Precision,
    out_dtype,
    interpret: bool,
) -> list[jax.Array]:
    """lhs[M, K], dout[M, N], offsets of all groups -> of each part a [G, K, N] as `shapes`, which are all modalities', in out_dtype. No size is 0."""
    schedule = schedule_groups(offsets, lhs.shape[0], interpret, parts=tuple(first_groups(shapes)[1:-1]))
    mine = [shapes[part.number] for part in parts]
    across = [_tiles_of(shape, tiles) for shape in mine]
    return launch(
        functools.partial(_wgrad_kernel, parts=parts, tiles=tiles, precision=precision),
        schedule,
        lhs,
        dout,
        out=[out_struct(shape, out_dtype, like=lhs) for shape in mine],
        grid=(sum(shape[0] * num_i * num_j for shape, (num_i, num_j) in zip(mine, across, strict=True)),),
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
        name="modality_grouped_matmul_wgrad",
    )
