"""The largest magnitudes of a tensor, of its rows or of its columns, ahead of the cast (Pallas on Triton)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.fp8 import infinity_to_nan, without_nan
from jaxops._lib.launch_pallas import launch_named
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.masked_pallas import both, load, store
from jaxops._lib.traced_once import traced_once
from jaxops.ops.quantize.plan import Arrays, Tiles
from jaxops.ops.quantize.tiles_pallas import COLUMNS, ROWS, Grid, index, largest, sizes_of


def _inside(offsets_ref, rows: jax.Array) -> jax.Array:
    """Which rows are in a group."""
    at = (jnp.full((1,) * rows.ndim, i, jnp.int32) for i in (0, offsets_ref.shape[0] - 1))
    first, end = (plgpu.load(offsets_ref.at[i]) for i in at)
    return (rows >= first) & (rows < end)


def _tensor_kernel(ref: dict, *, grid: Grid, programs: int, M: int, interpret: bool):
    """Program p of a tensor's P takes tiles p, p + P, ...: at the end L2 holds the end of the tensor."""
    x_ref, tiles, K = ref["x"], grid.tiles, ref["x"].shape[1]
    pid = pl.program_id(0)
    g, p = pid // programs, pid % programs
    across = pl.cdiv(K, tiles.cols)
    count = pl.cdiv(M, tiles.rows) * across

    def step(n, most):
        t = n * programs + p
        rows, columns = t // across * tiles.rows + grid.rows, t % across * tiles.cols + grid.columns
        inside = rows < M  # false past the last tile
        if "offsets" in ref:
            inside = inside & _inside(ref["offsets"], rows)
        x = load(x_ref, (g * M + rows, columns), both(inside, None if K % tiles.cols == 0 else columns < K))
        return jnp.maximum(most, sizes_of(infinity_to_nan(x), interpret))

    most = lax.fori_loop(0, pl.cdiv(count, programs), step, jnp.zeros(grid.shape, jnp.float32))
    store(ref["amax"], (index(pid),), without_nan(largest(most, (*COLUMNS, *ROWS, 2))))


@traced_once("tiles", "interpret")
def tensor_amax_pallas(tiles: Tiles, arrays: Arrays, *, interpret: bool) -> jax.Array:
    """[G, programs] float32: parts of each tensor's largest magnitude, over the rows in groups if there are offsets."""
    x = arrays.x
    G, M, K = x.shape
    programs = min(tiles.programs, pl.cdiv(M, tiles.rows) * pl.cdiv(K, tiles.cols))
    grid = Grid.of(tiles, x.dtype.itemsize, by_blocks=False)
    return launch_named(
        functools.partial(_tensor_kernel, grid=grid, programs=programs, M=M, interpret=interpret),
        {"x": x.reshape(G * M, K), "offsets": arrays.offsets},
        {"amax": out_struct((G * programs,), jnp.float32, like=x)},
        grid=(G * programs,),
        warps=tiles.warps,
        interpret=interpret,
        name="quantize_amax",
    )["amax"].reshape(G, programs)


def _lines_kernel(ref: dict, *, grid: Grid, M: int, interpret: bool):
    tiles, K = grid.tiles, ref["x"].shape[1]
    across, down = pl.cdiv(K, tiles.cols), pl.cdiv(M, tiles.rows)
    pid = pl.program_id(0)
    g, i, j = pid // (across * down), pid // across % down, pid % across
    rows, columns = i * tiles.rows + grid.rows, j * tiles.cols + grid.columns
    rows_in = None if M % tiles.rows == 0 else rows < M
    columns_in = None if K % tiles.cols == 0 else columns < K
    x = load(ref["x"], (g * M + rows, columns), both(rows_in, columns_in))
    found = sizes_of(infinity_to_nan(x), interpret)
    if "rows" in ref:
        store(ref["rows"], (index(j), g * M + rows), without_nan(largest(found, (*COLUMNS, 2))), rows_in)
    if "columns" in ref:
        of_groups = jnp.where(_inside(ref["offsets"], rows), found, 0.0) if "offsets" in ref else found
        store(ref["columns"], (index(i), g * K + columns), without_nan(largest(of_groups, ROWS)), columns_in)


@traced_once("tiles", "row", "col", "interpret")
def line_amax_pallas(
    tiles: Tiles, arrays: Arrays, *, row: bool, col: bool, interpret: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """The largest magnitudes of rows [G, M] and of columns [G, K] (over the rows in groups), float32; None unless
    asked.
    """
    x = arrays.x
    G, M, K = x.shape
    across, down = pl.cdiv(K, tiles.cols), pl.cdiv(M, tiles.rows)
    grid = Grid.of(tiles, x.dtype.itemsize, by_blocks=False)
    out = ({"rows": (across, G * M)} if row else {}) | ({"columns": (down, G * K)} if col else {})
    parts = launch_named(
        functools.partial(_lines_kernel, grid=grid, M=M, interpret=interpret),
        {"x": x.reshape(G * M, K), "offsets": arrays.offsets if col else None},
        {name: out_struct(shape, jnp.float32, like=x) for name, shape in out.items()},
        grid=(G * across * down,),
        warps=tiles.warps,
        interpret=interpret,
        name="quantize_amax",
    )
    found = {name: jnp.max(part, axis=0).reshape(G, -1) for name, part in parts.items()}
    return found.get("rows"), found.get("columns")
