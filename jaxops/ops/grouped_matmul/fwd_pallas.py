"""out[rows of g] = lhs[rows of g] @ (the weights of g), as a Pallas kernel lowered through Triton: for one array of
weights, or one a modality with widths of its own. With transpose_rhs it is dgrad."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.pallas.grouped_gemm_pallas import sums_over_columns
from jaxops._lib.pallas.launch_pallas import launch
from jaxops._lib.pallas.schedule_pallas import finds_own, schedule_rows, tile_in_list, tile_of, work_of_rows
from jaxops._lib.planning.traced_once import traced_once
from jaxops._lib.ragged.tiling import panel_order, tile_bound
from jaxops.ops.grouped_matmul.modalities import Part, cost_of, shapes_of
from jaxops.ops.grouped_matmul.plan import Tiles


def _fwd_kernel(
    work_ref,
    lhs_ref,
    *refs,
    count: int,
    parts,
    bound: int,
    tiles: Tiles,
    transpose_rhs: bool,
    precision: lax.Precision,
):
    """refs: `count` arrays of weights; `extra` of `fwd_pallas`, if there is one; the result."""
    rhs_refs, (*bias_ref, out_ref) = refs[:count], refs[count:]
    M, N = out_ref.shape
    bm, bn = tiles.bm, tiles.bn
    t, j = panel_order(pl.program_id(0), bound, pl.cdiv(N, bn), tiles.panel)
    if parts is None:
        group, start, end = tile_of(work_ref, t, rhs_refs[0].shape[0], M, bm)
    else:
        group, start, end = tile_in_list(work_ref, t)
    # Clips that change nothing, but from which the compiler knows that no int32 offset overflows: it then steps 64-bit
    # pointers instead of widening each offset in each step (H200, 2026-11-21, mixtral_up: 669 against 612 TFLOP/s).
    j, start = jnp.clip(j, 0, pl.cdiv(N, bn) - 1), jnp.clip(start, 0, M)
    cols = j * bn + jnp.arange(bn, dtype=jnp.int32)

    def product(rhs_ref, g, height: int, times) -> jax.Array:
        rows = start + jnp.arange(height, dtype=jnp.int32)
        # Rows of the next group may be read; they affect only rows that are not stored. Few rows read no others: a tile
        # is mostly empty, and its weights take the time.
        rows_in = rows < end if finds_own(M) else None
        settings = {"tile": (bn, tiles.bk), "times": times, "transpose_rhs": transpose_rhs, "precision": precision}
        return sums_over_columns(lhs_ref, [rhs_ref], g, (jnp.clip(rows, 0, M - 1), rows_in), j, **settings)[0]

    def store(tile) -> None:
        height = tile.shape[0]
        stored = (start + jnp.arange(height, dtype=jnp.int32) < end)[:, None]
        stored = stored if N % bn == 0 else stored & (cols < N)[None, :]
        at = out_ref.at[pl.ds(start, height), pl.ds(j * bn, bn)]
        plgpu.store(at, tile.astype(out_ref.dtype), mask=jnp.broadcast_to(stored, (height, bn)))

    def multiply(height: int) -> None:
        """One array of weights. Rows outside the groups take no step and are stored as zeros."""
        G = rhs_refs[0].shape[0]
        inside, g = group < G, jnp.clip(group, 0, G - 1)
        acc = product(rhs_refs[0], g, height, inside.astype(jnp.int32))
        if bias_ref:
            bias = plgpu.load(bias_ref[0].at[g, pl.ds(j * bn, bn)], mask=(cols < N) & inside, other=0.0)
            acc += bias.astype(jnp.float32)[None, :]
        store(acc)

    def multiply_modality(rhs_ref, first: int, width: int, height: int) -> None:
        acc = product(rhs_ref, jnp.clip(group - first, 0, rhs_ref.shape[0] - 1), height, 1)
        if width % bn and width < N:  # columns past the modality's are zeros, even if the row holds NaN
            acc = jnp.where((cols < width)[None, :], acc, 0)
        store(acc)

    def by_height(condition, body) -> None:
        """body(height): of the whole tile, or of a lower one for the last rows of a group."""
        high = condition & (end - start > tiles.tail)
        pl.when(high)(functools.partial(body, bm))
        pl.when(condition & ~high)(functools.partial(body, tiles.tail))

    if parts is None:
        if tiles.tail:
            by_height(jnp.ones((), jnp.bool_), multiply)
        else:
            multiply(bm)
        return
    multiplied = jnp.zeros((), jnp.bool_)
    for part, rhs_ref in zip(parts, rhs_refs, strict=True):
        (first, last), width = part.groups, rhs_ref.shape[1 if transpose_rhs else 2]
        own = (first <= group) & (group < last) & (j < pl.cdiv(width, bn))
        body = functools.partial(multiply_modality, rhs_ref, first, width)
        if tiles.tail:
            by_height(own, body)
        else:
            pl.when(own)(functools.partial(body, bm))
        multiplied |= own
    pl.when(~multiplied)(lambda: store(jnp.zeros((bm, bn), out_ref.dtype)))


@traced_once("parts", "out", "transpose_rhs", "tiles", "precision", "interpret")
def fwd_pallas(
    lhs, rhs, extra, offsets, *, parts: tuple[Part, ...] | None, out: jax.ShapeDtypeStruct, transpose_rhs: bool,
    tiles: Tiles, precision: lax.Precision, interpret: bool,
) -> jax.Array:  # fmt: skip
    """An array as `out`, [M, N]. No size is 0.

    Args:
      lhs: [M, K].
      rhs: arrays [G, K, N] ([G, N, K] with transpose_rhs): one, or that of each part.
      extra: without parts the bias [G, N]; with parts an array whose memory the result takes, and whose values the rows
        of other modalities keep; or None.
      offsets: [G + 1], of all groups.
      parts: modalities of this launch; None for one array of weights.
    """
    (M, N), G = out.shape, offsets.shape[0] - 1
    bound, spans = tile_bound(M, G, tiles.bm), () if parts is None else tuple(part.runs for part in parts)
    name = f"{'' if parts is None else 'modality_'}grouped_matmul_{'dgrad' if transpose_rhs else 'fwd'}"
    schedule = work_of_rows if parts is None else functools.partial(schedule_rows, spans=spans)
    work = schedule(offsets, M, tiles.bm, interpret)
    operands = (work, lhs, *rhs, *([] if extra is None else [extra]))
    settings = {"parts": parts, "bound": bound, "tiles": tiles, "transpose_rhs": transpose_rhs, "precision": precision}
    return launch(
        functools.partial(_fwd_kernel, count=len(rhs), **settings),
        *operands,
        out=out_struct(out.shape, out.dtype, like=lhs),
        grid=(bound * pl.cdiv(N, tiles.bn),),
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
        name=name,
        aliases={len(operands) - 1: 0} if parts and extra is not None else {},
        **cost_of(parts, shapes_of(rhs, transpose_rhs), G, (lhs, out), rhs),
    )
