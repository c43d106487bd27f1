"""A gated linear unit over ragged groups as one Pallas kernel lowered through Triton, for few rows: both products and
the activation. Rows may be gathered.

With few rows, reading the weights takes the time, and each launch beside it adds to it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.arrays.sums import sum_of_parts
from jaxops._lib.numerics.activations import unit as activated
from jaxops._lib.pallas import masked_pallas as masked
from jaxops._lib.pallas.grouped_gemm_pallas import sums_over_columns
from jaxops._lib.pallas.launch_pallas import launch
from jaxops._lib.pallas.schedule_pallas import tile_of, work_of_rows
from jaxops._lib.planning.traced_once import traced_once
from jaxops._lib.ragged.tiling import panel_order, tile_bound
from jaxops.ops.grouped_matmul import Tiles

# (refs of the operands, group, rows [height] of x, column tile, how many of the rows count, the number of a part of the
# sums or None for all) -> gate and up, float32 [height, bn]. At least one row counts, and min(how many, 1) is no
# constant: as a factor of a loop's bound it keeps the compiler from unrolling a loop over all of K, whose instructions
# a program would wait for once each.
Products = Callable[[Sequence[Any], jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None], Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Unit:
    """The static part of a launch.

    Attributes:
      name: shown by profilers.
      shape: M and F.
      dtype: of h, gate and up.
      activation: of the gate.
      save: whether gate and up are results, too.
      tiles: bm rows, bn columns of gate and as many of up; panel, warps and stages; split: parts of the sums, which a
        second pass adds and activates. Of `grouped_matmul`, or of `fp8_matmul`.
      tail: a group's last rows, if at most this many, use tiles of this height; 0 for none.
      interpret: runs in Pallas' interpreter.
    """

    name: str
    shape: tuple[int, int]
    dtype: Any
    activation: str
    tiles: Any
    interpret: bool
    save: bool = False
    tail: int = 0


def _kernel(work_ref, *refs, unit: Unit, products: Products, count: int, G: int, bound: int, gathers: bool):
    """refs: with `gathers` the indices; `count` operands, x first; h, and gate and up if they are results; with
    `tiles.split` instead gate and up, float32 [split, M, F]."""
    indices_ref, refs = (refs[0], refs[1:]) if gathers else (None, refs)
    operands, outs = refs[:count], refs[count:]
    (M, F), bn, split = unit.shape, unit.tiles.bn, unit.tiles.split
    number = pl.program_id(1) if split > 1 else None
    t, j = panel_order(pl.program_id(0), bound, pl.cdiv(F, bn), unit.tiles.panel)
    group, start, end = tile_of(work_ref, t, G, M, unit.tiles.bm)
    # Clips that change nothing, as in grouped_matmul's kernel: no int32 offset overflows.
    j, start = jnp.clip(j, 0, pl.cdiv(F, bn) - 1), jnp.clip(start, 0, M)

    def store(height: int, results: Sequence[jax.Array]) -> None:
        rows, cols = (first + jnp.arange(n, dtype=jnp.int32) for first, n in ((start, height), (j * bn, bn)))
        mask = masked.both((rows < end)[:, None], None if F % bn == 0 else (cols < F)[None, :])
        for ref, result in zip(outs, results, strict=True):
            at = (rows[:, None], cols[None, :])
            masked.store(ref, at if number is None else (number, *at), result, mask)

    def multiply(height: int) -> None:
        rows = jnp.clip(start + jnp.arange(height, dtype=jnp.int32), 0, M - 1)
        if indices_ref is not None:
            rows = jnp.clip(masked.load(indices_ref, (rows,)), 0, operands[0].shape[0] - 1)
        pre = products(operands, jnp.clip(group, 0, G - 1), rows, j, end - start, number)
        store(height, pre if split > 1 else _results(unit, pre)[: len(outs)])

    # A program past the last tile has nothing to do, and leaves.
    inside, high = (start < end) & (group < G), end - start > unit.tail
    pl.when(inside & high)(functools.partial(multiply, unit.tiles.bm))
    if unit.tail:
        pl.when(inside & ~high)(functools.partial(multiply, unit.tail))
    pl.when((start < end) & (group >= G))(lambda: store(unit.tiles.bm, [jnp.zeros((1, 1), jnp.float32)] * len(outs)))


def _results(unit: Unit, pre: Sequence[jax.Array]) -> list[jax.Array]:
    """h, gate and up: activated as they are saved, so that the backward sees the same numbers."""
    pre = [half.astype(unit.dtype) for half in pre]
    return [activated(unit.activation, *pre).astype(unit.dtype), *pre]


def launch_unit(
    unit: Unit, products: Products, operands: Sequence[jax.Array], offsets: jax.Array, indices: jax.Array | None
) -> tuple[jax.Array, ...]:
    """h [M, F], and with save gate and up [M, F]; rows outside the groups are zeros. No size is 0.

    Args:
      products: how a program multiplies.
      operands: of the products: x [rows, K], then those of the weights.
      offsets: [G + 1].
      indices: [M], the row of x of each row of h; None for the same row.
    """
    (M, F), G, tiles = unit.shape, offsets.shape[0] - 1, unit.tiles
    bound = tile_bound(M, G, tiles.bm)
    how = {"products": products, "count": len(operands), "G": G, "bound": bound, "gathers": indices is not None}
    work, count = work_of_rows(offsets, M, tiles.bm, unit.interpret), 3 if unit.save else 1
    grid: tuple[int, ...] = (bound * pl.cdiv(F, tiles.bn),)
    out = [out_struct((M, F), unit.dtype, like=operands[0])] * count
    if tiles.split > 1:
        grid += (tiles.split,)
        out = [out_struct((tiles.split, M, F), jnp.float32, like=operands[0])] * 2
    results = launch(
        functools.partial(_kernel, unit=unit, **how),
        *(work, *([] if indices is None else [indices]), *operands),
        out=out,
        grid=grid,
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=unit.interpret,
        name=unit.name,
        flops=2 * 2 * M * operands[0].shape[1] * F,
    )
    if tiles.split > 1:
        results = _results(unit, [sum_of_parts(parts) for parts in results])[:count]
    return tuple(results)


@traced_once("activation", "save", "tiles", "precision", "interpret")
def fwd_pallas(
    x: jax.Array, weights: tuple[jax.Array, ...], bias: jax.Array | None, offsets: jax.Array,
    indices: jax.Array | None = None, *, activation: str, save: bool, tiles: Tiles, precision: lax.Precision,
    interpret: bool,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """As `fwd_triton`, of any sizes above 0 and float32, too, and of two arrays of weights."""
    F = weights[0].shape[2]

    def products(refs, group, rows, j, count, number):
        rows_in = jnp.arange(rows.shape[0], dtype=jnp.int32) < count
        how: dict[str, Any] = {"tile": (tiles.bn, tiles.bk), "times": jnp.minimum(count, 1), "precision": precision}
        part = None if number is None else (number, tiles.split)
        sums = sums_over_columns(refs[0], refs[1:3], group, (rows, rows_in), j, part=part, **how)
        if bias is None:
            return sums
        columns = j * tiles.bn + jnp.arange(tiles.bn, dtype=jnp.int32)
        there = (columns < F) & (True if number is None else number == 0)  # of the first part of the sums
        return [
            acc + masked.load(refs[3], (group, half * F + columns), there)[None, :] for half, acc in enumerate(sums)
        ]

    shape = (x.shape[0] if indices is None else indices.shape[0], F)
    unit = Unit("grouped_glu_fused", shape, x.dtype, activation, tiles, interpret, save, tiles.tail)
    return launch_unit(unit, products, (x, *weights, *([] if bias is None else [bias])), offsets, indices)
