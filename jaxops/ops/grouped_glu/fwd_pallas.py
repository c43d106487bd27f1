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

from jaxops._lib import masked_pallas as masked
from jaxops._lib.activations import unit as activated
from jaxops._lib.grouped_gemm_pallas import sums_over_columns
from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.schedule_pallas import schedule_rows
from jaxops._lib.tiling import panel_order, tile_bound
from jaxops._lib.traced_once import traced_once
from jaxops._lib.work_list import COLUMNS
from jaxops.ops.grouped_matmul import Tiles

# (refs of the operands, group, rows [height] of x, column tile, 1) -> gate and up, float32 [height, bn]. The last one
# is not a constant, so that the compiler does not unroll a loop over all of K: a program would wait to fetch each
# instruction of it once.
Products = Callable[[Sequence[Any], jax.Array, jax.Array, jax.Array, jax.Array], Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Unit:
    """The static part of a launch.

    Attributes:
      name: shown by profilers.
      shape: M and F.
      dtype: of h, gate and up.
      activation: of the gate.
      save: whether gate and up are results, too.
      tiles: bm rows, bn columns of gate and as many of up; panel, warps and stages. Of `grouped_matmul`, or of
        `fp8_matmul`.
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
    """refs: with `gathers` the indices; `count` operands, x first; h, and gate and up if they are results."""
    indices_ref, refs = (refs[0], refs[1:]) if gathers else (None, refs)
    operands, outs = refs[:count], refs[count:]
    (M, F), bn = unit.shape, unit.tiles.bn
    t, j = panel_order(pl.program_id(0), bound, pl.cdiv(F, bn), unit.tiles.panel)
    group, start, end = (masked.load(work_ref, (i * (work_ref.shape[0] // COLUMNS) + t,)) for i in range(3))
    # Clips that change nothing, as in grouped_matmul's kernel: no int32 offset overflows.
    j, start = jnp.clip(j, 0, pl.cdiv(F, bn) - 1), jnp.clip(start, 0, M)

    def store(height: int, results: Sequence[jax.Array]) -> None:
        rows, cols = (first + jnp.arange(n, dtype=jnp.int32) for first, n in ((start, height), (j * bn, bn)))
        mask = masked.both((rows < end)[:, None], None if F % bn == 0 else (cols < F)[None, :])
        for ref, result in zip(outs, results, strict=True):
            masked.store(ref, (rows[:, None], cols[None, :]), result, mask)

    def multiply(height: int) -> None:
        # Rows of the next group may be read; they affect only rows that are not stored.
        rows = jnp.clip(start + jnp.arange(height, dtype=jnp.int32), 0, M - 1)
        if indices_ref is not None:
            rows = jnp.clip(masked.load(indices_ref, (rows,)), 0, operands[0].shape[0] - 1)
        # Activated as they are saved: the backward sees the same numbers.
        pre = products(operands, jnp.clip(group, 0, G - 1), rows, j, jnp.minimum(end - start, 1))
        pre = [half.astype(unit.dtype) for half in pre]
        store(height, [activated(unit.activation, *pre), *pre][: len(outs)])

    # A program past the last tile has nothing to do, and leaves.
    inside, high = (start < end) & (group < G), end - start > unit.tail
    pl.when(inside & high)(functools.partial(multiply, unit.tiles.bm))
    if unit.tail:
        pl.when(inside & ~high)(functools.partial(multiply, unit.tail))
    pl.when((start < end) & (group >= G))(lambda: store(unit.tiles.bm, [jnp.zeros((1, 1), jnp.float32)] * len(outs)))


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
    work = schedule_rows(offsets, M, tiles.bm, unit.interpret)
    return tuple(
        launch(
            functools.partial(_kernel, unit=unit, **how),
            *(work, *([] if indices is None else [indices]), *operands),
            out=[out_struct((M, F), unit.dtype, like=operands[0])] * (3 if unit.save else 1),
            grid=(bound * pl.cdiv(F, tiles.bn),),
            warps=tiles.warps,
            stages=tiles.stages,
            interpret=unit.interpret,
            name=unit.name,
            flops=2 * 2 * M * operands[0].shape[1] * F,
        )
    )


@traced_once("activation", "save", "tiles", "precision", "interpret")
def fwd_pallas(
    x: jax.Array, weights: tuple[jax.Array, ...], offsets: jax.Array, indices: jax.Array | None = None, *,
    activation: str, save: bool, tiles: Tiles, precision: lax.Precision, interpret: bool,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """As `fwd_triton`, of any sizes above 0 and float32, too."""

    def products(refs, group, rows, j, times):
        how: dict[str, Any] = {"tile": (tiles.bn, tiles.bk), "times": times, "precision": precision}
        return sums_over_columns(refs[0], refs[1:], group, rows, j, **how)

    shape = (x.shape[0] if indices is None else indices.shape[0], weights[0].shape[2])
    unit = Unit("grouped_glu_fused", shape, x.dtype, activation, tiles, interpret, save, tiles.tail)
    return launch_unit(unit, products, (x, *weights), offsets, indices)
