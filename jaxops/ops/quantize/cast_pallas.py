"""The cast: one read of each tile, its scales, its values in every layout; and a pass before it for the largest
magnitudes, where a scale spans several tiles (Pallas on Triton)."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.numerics.fp8 import (
    BLOCK,
    cast_saturating,
    cast_stochastic,
    infinity_to_nan,
    nan_to_zero,
    random_bits,
    scale_and_factor,
)
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.pallas.masked_pallas import both, load, store
from jaxops._lib.pallas.schedule_pallas import schedule_rows
from jaxops._lib.planning.costs import bytes_of
from jaxops._lib.planning.traced_once import traced_once
from jaxops._lib.ragged.offsets import padded_rows
from jaxops._lib.ragged.tiling import tile_bound
from jaxops.ops.quantize.plan import Arrays, Spec, Tiles
from jaxops.ops.quantize.tile_pallas import (
    BLOCKS,
    COLUMNS,
    ROWS,
    Grid,
    Location,
    Mask,
    abs_for_max,
    inside,
    locate,
)


def _sources(arrays: Arrays) -> dict[str, jax.Array | None]:
    """The operands of which `_read` takes elements, stacks as one matrix."""
    x, right = (None if a is None else a.reshape(-1, a.shape[2]) for a in (arrays.x, arrays.right))
    return {"x": x, "right": right, "indices": arrays.indices}


def _read(ref: dict, grid: Grid, at: tuple[jax.Array, jax.Array], rows_in: Mask, columns_in: Mask, j) -> jax.Array:
    """A tile of the tensor that is cast (see `Arrays`), zeros where a mask does not hold.

    Args:
      at: rows (of a stack, as one matrix) and columns.
      j: scalar, the tile's number among those of its rows.
    """
    (rows, columns), x_ref = at, ref["x"]
    if "indices" in ref:
        # Without a mask, so that no predicate keeps a thread's loads of indices from being issued all at once.
        found = load(ref["indices"], (jnp.minimum(rows, ref["indices"].shape[0] - 1),))
        rows = jnp.clip(found, 0, x_ref.shape[0] - 1)
    if "right" not in ref:
        return load(x_ref, (rows, columns), both(rows_in, columns_in))
    F, cols = x_ref.shape[1], grid.tiles.cols
    in_left = grid.index(j) < F // cols if F % cols == 0 else columns < F
    left = load(x_ref, (rows, columns), both(rows_in, in_left))
    # Into the same registers: a thread waits for the first load only where the second one is masked off.
    return load(ref["right"], (rows, columns - F), both(rows_in, columns_in, ~in_left), other=left)


def _lines_kernel(ref: dict, *, grid: Grid, size: tuple[int, int, int], interpret: bool):
    tiles, (_, M, K) = grid.tiles, size
    across, down = pl.cdiv(K, tiles.cols), pl.cdiv(M, tiles.rows)
    pid = pl.program_id(0)
    g, i, j = pid // (across * down), pid // across % down, pid % across
    if "indices" in ref:  # column by column, as in _tensor_kernel; of one tensor
        i, j = pid % down, pid // down
    rows, columns = i * tiles.rows + grid.rows, j * tiles.cols + grid.columns
    rows_in = None if M % tiles.rows == 0 else rows < M
    columns_in = None if K % tiles.cols == 0 else columns < K
    if "indices" in ref:  # rows outside the groups are not read
        rows_in = both(rows_in, inside(ref["offsets"], rows))
    x = _read(ref, grid, (g * M + rows, columns), rows_in, columns_in, j)
    found = abs_for_max(infinity_to_nan(x), interpret)
    if "rows" in ref:
        store(ref["rows"], (grid.index(j), g * M + rows), nan_to_zero(grid.largest(found, *COLUMNS, *BLOCKS)), rows_in)
    if "columns" in ref:
        of_groups = jnp.where(inside(ref["offsets"], rows), found, 0.0) if "offsets" in ref else found
        store(ref["columns"], (grid.index(i), g * K + columns), nan_to_zero(grid.largest(of_groups, *ROWS)), columns_in)


@traced_once("tiles", "row", "col", "interpret")
def line_amax_pallas(
    tiles: Tiles, arrays: Arrays, *, row: bool, col: bool, interpret: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """The largest magnitudes of rows [G, M] and of columns [G, K] (over the rows in groups), float32; None unless
    asked.
    """
    x, (G, M, K) = arrays.x, arrays.shape
    across, down = pl.cdiv(K, tiles.cols), pl.cdiv(M, tiles.rows)
    grid = Grid.of(tiles, x.dtype.itemsize, by_blocks=False)
    out = ({"rows": (across, G * M)} if row else {}) | ({"columns": (down, G * K)} if col else {})
    parts = launch_named(
        functools.partial(_lines_kernel, grid=grid, size=(G, M, K), interpret=interpret),
        _sources(arrays) | {"offsets": arrays.offsets if col else None},
        {name: out_struct(shape, jnp.float32, like=x) for name, shape in out.items()},
        grid=(G * across * down,),
        warps=tiles.warps,
        interpret=interpret,
        name="quantize_amax",
        # A magnitude, and its comparison with its row's and its column's largest one.
        flops=(1 + row + col) * math.prod(arrays.shape),
    )
    found = {name: jnp.max(part, axis=0).reshape(G, -1) for name, part in parts.items()}
    return found.get("rows"), found.get("columns")


def _scale(
    ref: dict, spec: Spec, grid: Grid, sizes: jax.Array, p: Location, size: tuple[int, int, int]
) -> tuple[jax.Array | None, jax.Array | None]:
    """The factors of the row layout's and the column layout's values; stores this tile's scales."""
    (G, M, K), g = size, p.g

    def scale_of(amax):
        return scale_and_factor(amax, spec.fp8, spec.pow2, is_bfloat16=ref["x"].dtype == jnp.bfloat16)

    if spec.scaling == "tensorwise":
        n = ref["amax"].shape[0] // G
        part = jnp.arange(power_of_2(n), dtype=jnp.int32)
        amax = jnp.max(plgpu.load(ref["amax"].at[g * n + part], mask=part < n, other=0.0))
        amax = jnp.broadcast_to(amax, p.block.shape)
        scale, factor = scale_and_factor(amax, spec.fp8, spec.pow2)  # a given amax is any float32
        store(ref["scales"], (jnp.zeros_like(p.block) + g,), scale, p.is_first)
        return factor, factor
    if "row_factors" in ref or "col_factors" in ref:
        row = load(ref["row_factors"], (g * M + p.rows,), p.rows_in) if spec.row else None
        col = load(ref["col_factors"], (g * K + p.columns,), p.columns_in) if spec.col else None
        return row, col
    if spec.scaling == "rowwise":
        scale, factor = scale_of(grid.largest(sizes, *COLUMNS))
        store(ref["scales"], (g * M + p.rows,), scale, p.rows_in)
        return factor, factor
    across, down = pl.cdiv(K, BLOCK), pl.cdiv(ref["values_t"].shape[1] if "tiles" in ref else M, BLOCK)
    if spec.scaling == "block_128x128":
        scale, factor = scale_of(grid.largest(sizes, *COLUMNS, *ROWS))
        if spec.row:
            store(ref["scales"], (g * down + p.block, p.blocks), scale, p.blocks_in)
        if spec.col:
            store(ref["scales_t"], (g * across + p.blocks, p.block), scale, p.blocks_in)
        return factor, factor
    row = col = None
    if spec.row:
        scale, row = scale_of(grid.largest(sizes, *COLUMNS))
        store(ref["scales"], (g * across + p.blocks, p.rows), scale, both(p.rows_in, p.blocks_in))
    if spec.col:
        scale, col = scale_of(grid.largest(sizes, *ROWS))
        store(ref["scales_t"], (g * down + p.block, p.columns), scale, both(p.columns_in, p.block_in))
    return row, col


def _cast_kernel(ref: dict, *, spec: Spec, grid: Grid, size: tuple[int, int, int], down: int, interpret: bool):
    G, M, K = size
    pid = pl.program_id(0)
    if spec.scaling == "tensorwise":  # from the end, which the pass before has left in L2
        pid = G * down * pl.cdiv(K, grid.tiles.cols) - 1 - pid
    p = locate(ref, pid, grid, size, down)
    rows_in = both(p.rows_in, p.block_in) if "indices" in ref else p.rows_in  # no tile outside the groups is read
    x = infinity_to_nan(_read(ref, grid, (p.g * M + p.rows, p.columns), rows_in, p.columns_in, p.j))
    sizes = abs_for_max(x, interpret)
    if "measured" in ref:
        amax = nan_to_zero(grid.largest(sizes, *COLUMNS, *ROWS, *BLOCKS))
        store(ref["measured"], (jnp.zeros_like(p.block) + pid,), amax)
    factors = _scale(ref, spec, grid, sizes, p, size)
    random = None
    if "words" in ref:
        row_word, column_word = (plgpu.load(ref["words"].at[grid.index(n)]) for n in range(2))
        random = random_bits(p.g * M + p.rows, p.columns, (row_word, column_word))

    def cast(factor, arranged=lambda tile: tile):
        values = arranged(x * factor)
        if random is None:
            return cast_saturating(values, spec.fp8, saturates=not interpret)
        return cast_stochastic(values, spec.fp8, arranged(random))

    if spec.row:
        store(ref["values"], (p.g * M + p.rows, p.columns), cast(factors[0]), both(p.rows_in, p.columns_in))
    if spec.col:
        store(ref["values_t"], (p.g * K + p.columns_t, p.rows_t), cast(factors[1], grid.transposed), p.t_in)


@traced_once("spec", "tiles", "interpret")
def cast_pallas(
    spec: Spec, tiles: Tiles, arrays: Arrays, factors: dict[str, jax.Array], *, interpret: bool
) -> dict[str, jax.Array]:
    """By name: values, scales, values_t, scales_t as in `Quantized` with a leading G, of the layouts asked. No size is
    0.

    Args:
      factors: of the amax pass: amax [G, parts] (tensorwise), or row_factors [G, M] and col_factors [G, K] (rowwise),
        whose scales are known and not written; else {}.
    """
    x, offsets, words, (G, M, K) = arrays.x, arrays.offsets, arrays.words, arrays.shape
    col_blocks, row_blocks = pl.cdiv(K, BLOCK), pl.cdiv(M, BLOCK)
    down, M_t = pl.cdiv(M, tiles.rows), M
    unused = 0  # bytes of the columns and scales that are not written unless every group ends in a partial block
    operands = _sources(arrays) | {name: value.reshape(-1) for name, value in factors.items()}
    if offsets is not None and spec.col:
        groups = offsets.shape[0] - 1
        down, M_t = tile_bound(M, groups, tiles.rows), padded_rows(M, groups)
        row_blocks = M_t // BLOCK
        operands["tiles"] = schedule_rows(offsets, M, tiles.rows, interpret)
        unused = groups * K * (BLOCK + 4 * (spec.scaling == "block_1x128"))
    programs = G * down * pl.cdiv(K, tiles.cols)

    fp8, f32 = jnp.dtype(spec.fp8), jnp.dtype("float32")
    out = {"values": ((G * M, K), fp8)} if spec.row else {}
    out |= {"values_t": ((G * K, M_t), fp8)} if spec.col else {}
    shapes = {
        "tensorwise": {"scales": (G,)},
        "rowwise": {} if factors else {"scales": (G * M,)},
        "block_1x128": {"scales": (G * col_blocks, M), "scales_t": (G * row_blocks, K)},
        "block_128x128": {"scales": (G * row_blocks, col_blocks), "scales_t": (G * col_blocks, row_blocks)},
    }[spec.scaling]
    wanted = {"scales": spec.row or spec.scaling == "tensorwise", "scales_t": spec.col}
    out |= {name: (shape, f32) for name, shape in shapes.items() if wanted[name]}
    out |= {"measured": ((programs,), f32)} if spec.measure and arrays.amax is not None else {}
    grid = Grid.of(tiles, x.dtype.itemsize, by_blocks=spec.scaling == "block_1x128" and spec.row)
    results = {name: out_struct(*shape_and_dtype, like=x) for name, shape_and_dtype in out.items()}
    # An element: its magnitude and a comparison unless its scale is known, and in each layout times the factor.
    flops = (2 * (not factors) + spec.row + spec.col) * math.prod(arrays.shape)
    found = launch_named(
        functools.partial(_cast_kernel, spec=spec, grid=grid, size=(G, M, K), down=down, interpret=interpret),
        operands | {"words": words},
        results,
        grid=(programs,),
        warps=tiles.warps,
        interpret=interpret,
        name="quantize_cast",
        flops=flops,
        bytes_accessed=bytes_of(*operands.values(), words, *results.values()) - unused,
    )
    results = {name: value.reshape(G, -1, *value.shape[1:]) for name, value in found.items()}
    return results | ({"scales": results["scales"][:, 0]} if spec.scaling == "tensorwise" else {})
