"""(weight gradient of g) = lhs[rows of g].T @ dout[rows of g], as a Pallas kernel lowered through Triton: for one array
of weights, or one a modality with widths of its own."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.pallas.grouped_gemm_pallas import sum_over_rows
from jaxops._lib.pallas.launch_pallas import launch
from jaxops._lib.pallas.schedule_pallas import schedule_groups
from jaxops._lib.planning.traced_once import traced_once
from jaxops._lib.ragged.tiling import panel_order
from jaxops._lib.ragged.work_list import COLUMNS
from jaxops.ops.grouped_matmul.modalities import Part, Shapes, cost_of, first_groups
from jaxops.ops.grouped_matmul.plan import Tiles


def _count(shape, tiles: Tiles) -> int:
    """Tiles of all groups of a [G, K, N]."""
    return shape[0] * pl.cdiv(shape[1], tiles.bm) * pl.cdiv(shape[2], tiles.bn)


def _wgrad_kernel(
    groups_ref, lhs_ref, dout_ref, *refs, firsts: tuple[int, ...], tiles: Tiles, precision: lax.Precision
):
    """refs: an accumulator or none; a result for each modality, whose groups start at firsts[i]."""
    accumulators, out_refs = refs[: -len(firsts)], refs[-len(firsts) :]
    bm, bn = tiles.bm, tiles.bn

    def multiply(out_ref, first: int, number) -> None:
        """A tile of a modality's result, by its number among the modality's tiles."""
        G, K, N = out_ref.shape
        num_i, num_j = pl.cdiv(K, bm), pl.cdiv(N, bn)
        rank = first + number // (num_i * num_j)
        i, j = panel_order(number % (num_i * num_j), num_i, num_j, tiles.panel)
        g, start, end = (plgpu.load(groups_ref.at[n * (groups_ref.shape[0] // COLUMNS) + rank]) for n in range(3))
        settings = {"sizes": (K, N), "tile": (bm, bn, tiles.bk), "peel": tiles.peel, "precision": precision}
        acc = sum_over_rows(lhs_ref, dout_ref, (start, end), i, j, **settings)
        mask = jnp.ones((bm, bn), jnp.bool_)
        mask = mask if K % bm == 0 else mask & (i * bm + jnp.arange(bm, dtype=jnp.int32) < K)[:, None]
        mask = mask if N % bn == 0 else mask & (j * bn + jnp.arange(bn, dtype=jnp.int32) < N)[None, :]
        at = jnp.clip(g - first, 0, G - 1), pl.ds(i * bm, bm), pl.ds(j * bn, bn)  # clipped as in fwd_pallas.py
        if accumulators:
            mask &= end > start  # an empty group leaves the accumulator unchanged, to the bit
            acc += plgpu.load(accumulators[0].at[at], mask=mask, other=0.0).astype(jnp.float32)
        plgpu.store(out_ref.at[at], acc.astype(out_ref.dtype), mask=mask)

    if len(out_refs) == 1:
        return multiply(out_refs[0], firsts[0], pl.program_id(0))
    before = 0
    for first, out_ref in zip(firsts, out_refs, strict=True):
        number, count = pl.program_id(0) - before, _count(out_ref.shape, tiles)
        pl.when((number >= 0) & (number < count))(functools.partial(multiply, out_ref, first, number))
        before += count
    return None


@traced_once("parts", "shapes", "out_dtype", "tiles", "precision", "interpret")
def wgrad_pallas(
    lhs, dout, accumulator, offsets, *, parts: tuple[Part, ...] | None, shapes: Shapes, out_dtype, tiles: Tiles,
    precision: lax.Precision, interpret: bool,
) -> list[jax.Array]:  # fmt: skip
    """Weight gradients [G, K, N] in out_dtype: one, or that of each part. No size is 0.

    Args:
      lhs, dout: [M, K], [M, N].
      accumulator: [G, K, N] that the gradient is added to and whose memory it takes, or None. Not with parts.
      offsets: [G + 1], of all groups.
      parts: modalities of this launch; None for one array of weights.
      shapes: of the weights of all modalities.
    """
    own = shapes if parts is None else [shapes[part.number] for part in parts]
    firsts = (0,) if parts is None else tuple(part.groups[0] for part in parts)
    schedule = schedule_groups(offsets, lhs.shape[0], interpret, parts=tuple(first_groups(shapes)[1:-1]))
    out = [out_struct(shape, out_dtype, like=lhs) for shape in own]
    return launch(
        functools.partial(_wgrad_kernel, firsts=firsts, tiles=tiles, precision=precision),
        *(schedule, lhs, dout, *([] if accumulator is None else [accumulator])),
        out=out,
        grid=(sum(_count(shape, tiles) for shape in own),),
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
        name=f"{'' if parts is None else 'modality_'}grouped_matmul_wgrad",
        aliases={} if accumulator is None else {3: 0},
        **cost_of(parts, own, offsets.shape[0] - 1, (lhs, dout), out),
    )
