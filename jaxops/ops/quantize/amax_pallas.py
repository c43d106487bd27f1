"""The largest magnitudes that scales are made of, where no program of the cast sees enough of the tensor, as Pallas kernels lowered through Triton."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.fp8 import infinity_to_nan, without_nan
from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.quantize.plan import Arrays, Tiles
from jaxops.ops.quantize.tiles_pallas import COLUMNS, ROWS, Grid, both, largest, load, sizes_of, store


def _inside(offsets_ref, rows: jax.Array) -> jax.Array:
    """Which rows are in a group."""
    first, end = (
        plgpu.load(offsets_ref.at[jnp.full((1,) * rows.ndim, i, jnp.int32)]) for i in (0, offsets_ref.shape[0] - 1)
    )
    return (rows >= first) & (rows < end)


def _tensor_kernel(*refs, grid: Grid, programs: int, M: int, interpret: bool):
    """Program p of a tensor's P takes the tiles p, p + P, ...: all programs together walk down the tensor, and its end is what L2 holds afterwards."""
    x_ref, out_ref, K = refs[0], refs[-1], refs[0].shape[1]
    pid = pl.program_id(0)
    g, p = pid // programs, pid % programs
    across = pl.cdiv(K, grid.tile.cols)
    tiles = pl.cdiv(M, grid.tile.rows) * across

    def step(n, most):
        t = n * programs + p
        rows, columns = t // across * grid.tile.rows + grid.rows, t % across * grid.tile.cols + grid.columns
        inside = (
            rows < M if len(refs) == 2 else (rows < M) & _inside(refs[1], rows)
        )  # past the last tile there are no rows
        x = load(x_ref, (g * M + rows, columns), both(inside, None if K % grid.tile.cols == 0 else columns < K))
        return jnp.maximum(most, sizes_of(infinity_to_nan(x), interpret))

    most = lax.fori_loop(0, pl.cdiv(tiles, programs), step, jnp.zeros(grid.shape, jnp.float32))
    store(out_ref, (jnp.full((1,) * 6, pid, jnp.int32),), without_nan(largest(most, (*COLUMNS, *ROWS, 2))), None)


@traced_once("tile", "interpret")
def tensor_amax_pallas(tile: Tiles, arrays: Arrays, *, interpret: bool) -> jax.Array:
    """[G, programs] float32: parts of each tensor's largest magnitude, over the rows inside the groups where there are such."""
    x, offsets = arrays.x, arrays.offsets
    G, M, K = x.shape
    grid = Grid.of(tile, x.dtype.itemsize, by_blocks=False)
    programs = min(tile.programs, pl.cdiv(M, tile.rows) * pl.cdiv(K, tile.cols))
    found = launch(
        functools.partial(_tensor_kernel, grid=grid, programs=programs, M=M, interpret=interpret),
        x.reshape(G * M, K),
        *([] if offsets is None else [offsets]),
        out=out_struct((G * programs,), jnp.float32, like=x),
        grid=(G * programs,),
        warps=tile.warps,
        interpret=interpret,
        name="quantize_amax",
    )
    return found.reshape(G, programs)


def _lines_kernel(*refs, names: tuple[str, ...], grid: Grid, M: int, interpret: bool):
    ref = dict(zip(names, refs, strict=True))
    K = ref["x"].shape[1]
    across, down = pl.cdiv(K, grid.tile.cols), pl.cdiv(M, grid.tile.rows)
    pid = pl.program_id(0)
    g, i, j = pid // (across * down), pid // across % down, pid % across
    rows, columns = i * grid.tile.rows + grid.rows, j * grid.tile.cols + grid.columns
    rows_in = None if M % grid.tile.rows == 0 else rows < M
    columns_in = None if K % grid.tile.cols == 0 else columns < K
    x = load(ref["x"], (g * M + rows, columns), both(rows_in, columns_in))
    found = sizes_of(infinity_to_nan(x), interpret)
    zero = jnp.zeros((1,) * 6, jnp.int32)
    if "rows" in ref:
        store(ref["rows"], (zero + j, g * M + rows), without_nan(largest(found, (*COLUMNS, 2))), rows_in)
    if "columns" in ref:
        of_groups = jnp.where(_inside(ref["offsets"], rows), found, 0.0) if "offsets" in ref else found
        store(ref["columns"], (zero + i, g * K + columns), without_nan(largest(of_groups, ROWS)), columns_in)


@traced_once("tile", "row", "col", "interpret")
def line_amax_pallas(
    tile: Tiles, arrays: Arrays, *, row: bool, col: bool, interpret: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """The largest magnitude of each row [G, M] and of each column [G, K] (over the rows inside the groups), float32, as far as they are wanted."""
    x, offsets = arrays.x, arrays.offsets
    G, M, K = x.shape
    grid = Grid.of(tile, x.dtype.itemsize, by_blocks=False)
    across, down = pl.cdiv(K, tile.cols), pl.cdiv(M, tile.rows)
    operands = {"x": x.reshape(G * M, K)} | ({} if offsets is None or not col else {"offsets": offsets})
    outs = ({"rows": (across, G * M)} if row else {}) | ({"columns": (down, G * K)} if col else {})
    parts = launch(
        functools.partial(_lines_kernel, names=(*operands, *outs), grid=grid, M=M, interpret=interpret),
        *operands.values(),
        out=[out_struct(shape, jnp.float32, like=x) for shape in outs.values()],
        grid=(G * across * down,),
        warps=tile.warps,
        interpret=interpret,
        name="quantize_amax",
    )
    found = {name: jnp.max(part, axis=0).reshape(G, -1) for name, part in zip(outs, parts, strict=True)}
    return found.get("rows"), found.get("columns")
