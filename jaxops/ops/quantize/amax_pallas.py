"""Passes before a cast that find largest magnitudes, where a scale spans several tiles (Pallas on Triton)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.numerics.fp8 import infinity_to_nan, nan_to_zero
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.pallas.masked_pallas import both, store
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.quantize.outputs import Computation, Operands, itemsize_of, size_of
from jaxops.ops.quantize.plan import Tiles
from jaxops.ops.quantize.tile_pallas import BLOCKS, COLUMNS, ROWS, Grid, abs_for_max, inside, read, refs_of


def _lines_kernel(ref: dict, *, computation: Computation, grid: Grid, size: tuple[int, int, int], interpret: bool):
    tiles, (_, M, K) = grid.tiles, size
    across, down = pl.cdiv(K, tiles.cols), pl.cdiv(M, tiles.rows)
    pid = pl.program_id(0)
    g, i, j = pid // (across * down), pid // across % down, pid % across
    gathered = "Gathered" in computation.kinds
    if gathered:  # column by column, as in the cast; of one tensor
        i, j = pid % down, pid // down
    rows, columns = i * tiles.rows + grid.rows, j * tiles.cols + grid.columns
    rows_in = None if M % tiles.rows == 0 else rows < M
    columns_in = None if K % tiles.cols == 0 else columns < K
    if gathered:  # rows outside the groups are not read
        rows_in = both(rows_in, inside(ref["offsets"], rows))
    (x,), _ = read(ref, computation, grid, (g * M + rows, columns), rows_in, columns_in, j)
    sizes = abs_for_max(infinity_to_nan(x), interpret)
    if "rows" in ref:
        store(ref["rows"], (grid.index(j), g * M + rows), nan_to_zero(grid.largest(sizes, *COLUMNS, *BLOCKS)), rows_in)
    if "columns" in ref:
        of_groups = jnp.where(inside(ref["offsets"], rows), sizes, 0.0) if "offsets" in ref else sizes
        store(ref["columns"], (grid.index(i), g * K + columns), nan_to_zero(grid.largest(of_groups, *ROWS)), columns_in)


@traced_once("computation", "tiles", "row", "col", "interpret")
def line_amax_pallas(
    computation: Computation, tiles: Tiles, operands: Operands, offsets: jax.Array | None, *, row: bool, col: bool,
    interpret: bool,
) -> tuple[jax.Array | None, jax.Array | None]:  # fmt: skip
    """The largest magnitudes of rows [G, M] and of columns [G, K] (over the rows in groups) of the one tensor that is
    cast, float32; None unless asked.
    """
    G, M, K = size = size_of(operands)
    named, across, down = refs_of(operands), pl.cdiv(K, tiles.cols), pl.cdiv(M, tiles.rows)
    like = next(iter(named.values()))
    grid = Grid.of(tiles, itemsize_of(operands), by_blocks=False)
    out = ({"rows": (across, G * M)} if row else {}) | ({"columns": (down, G * K)} if col else {})
    parts = launch_named(
        functools.partial(_lines_kernel, computation=computation, grid=grid, size=size, interpret=interpret),
        named | {"offsets": offsets if col else None},
        {name: out_struct(shape, jnp.float32, like=like) for name, shape in out.items()},
        grid=(G * across * down,),
        warps=tiles.warps,
        interpret=interpret,
        name="quantize_amax",
        # A magnitude, and its comparison with its row's and its column's largest one.
        flops=(1 + row + col) * math.prod(size),
    )
    largest = {name: jnp.max(part, axis=0).reshape(G, -1) for name, part in parts.items()}
    return largest.get("rows"), largest.get("columns")


def _tensors_kernel(
    ref: dict, *, computation: Computation, grid: Grid, programs: int, size: tuple[int, int, int], interpret: bool
):
    """Program p of P takes tiles p, p + P, ...: at the end L2 holds the end of the operands."""
    (_, R, C), tiles, p = size, grid.tiles, pl.program_id(0)
    across = pl.cdiv(C, tiles.cols)
    count = pl.cdiv(R, tiles.rows) * across

    def step(n, most):
        t = n * programs + p
        j = t % across
        rows, columns = t // across * tiles.rows + grid.rows, j * tiles.cols + grid.columns
        rows_in = rows < R  # false past the last tile
        if "offsets" in ref:
            rows_in = rows_in & inside(ref["offsets"], rows)
        columns_in = None if C % tiles.cols == 0 else columns < C
        tensors, _ = read(ref, computation, grid, (rows, columns), rows_in, columns_in, j)
        largest: dict[int, Any] = dict.fromkeys(computation.measured)
        for (output, _), x in zip(computation.tensors(), tensors, strict=True):
            if output in largest:
                # Of a thread's neighbours one number is kept: the loop carries an eighth of the registers.
                size, before = grid.largest(abs_for_max(infinity_to_nan(x), interpret), "vector"), largest[output]
                largest[output] = size if before is None else jnp.maximum(before, size)
        return [jnp.maximum(a, b) for a, b in zip(most, largest.values(), strict=True)]

    kept = tuple(1 if axis == "vector" else n for axis, n in zip(grid.axes, grid.shape, strict=True))
    zeros = [jnp.zeros(kept, jnp.float32) for _ in computation.measured]
    most = lax.fori_loop(0, pl.cdiv(count, programs), step, zeros)
    for i, x in enumerate(most):
        store(ref["amax"], (grid.index(i), grid.index(p)), nan_to_zero(grid.largest(x, *COLUMNS, *ROWS, *BLOCKS)))


@traced_once("computation", "tiles", "interpret")
def tensor_amax_pallas(
    computation: Computation, tiles: Tiles, operands: Operands, offsets: jax.Array | None, *, interpret: bool
) -> jax.Array:
    """[outputs that are measured] float32: each one's largest magnitude, over the rows in groups if there are
    offsets."""
    _, R, C = size = size_of(operands)
    programs = min(tiles.programs, pl.cdiv(R, tiles.rows) * pl.cdiv(C, tiles.cols))
    named, grid = refs_of(operands), Grid.of(tiles, itemsize_of(operands), by_blocks=False)
    out = out_struct((len(computation.measured), programs), jnp.float32, like=next(iter(named.values())))
    how: dict = {"grid": grid, "programs": programs, "size": size, "interpret": interpret}
    parts = launch_named(
        functools.partial(_tensors_kernel, computation=computation, **how),
        named | {"offsets": offsets},
        {"amax": out},
        grid=(programs,),
        warps=tiles.warps,
        interpret=interpret,
        name="quantize_computed_amax",
        flops=computation.flops_of_element() * R * C,
    )["amax"]
    return jnp.max(parts, axis=1)
