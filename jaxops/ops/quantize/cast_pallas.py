"""The cast: one read of each tile, its scales, and the values of every layout that is wanted, as a Pallas kernel lowered through Triton."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.fp8 import (
    BLOCK,
    cast_saturating,
    cast_stochastic,
    infinity_to_nan,
    random_bits,
    scale_and_factor,
    without_nan,
)
from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.powers import power_of_2
from jaxops._lib.ragged import padded_rows
from jaxops._lib.schedule_pallas import schedule_rows
from jaxops._lib.tiling import panel_order, tile_bound
from jaxops._lib.traced_once import traced_once
from jaxops._lib.work_list import COLUMNS as SCHEDULED
from jaxops.ops.quantize.plan import Arrays, Spec, Tiles
from jaxops.ops.quantize.tiles_pallas import COLUMNS, ROWS, Grid, both, largest, load, sizes_of, store


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a program's tile lies in tensor g of the stack: six-dimensional index arrays, and masks, None where they always hold.

    Attributes:
      g, first: the tensor's number, and whether this is its first tile.
      rows, rows_in: of x and the row layout.
      rows_t, rows_t_in: of what values_t holds, counted from its first column.
      block: number of the 128 rows among those of values_t.
      columns, columns_in: of x.
      blocks, blocks_in: numbers of the 128 columns.
    """

    g: jax.Array
    first: jax.Array
    rows: jax.Array
    rows_in: jax.Array | None
    rows_t: jax.Array
    rows_t_in: jax.Array | None
    block: jax.Array
    columns: jax.Array
    columns_in: jax.Array | None
    blocks: jax.Array
    blocks_in: jax.Array | None


def _find_place(ref: dict, pid: jax.Array, grid: Grid, size: tuple[int, int, int], down: int) -> Place:
    (_, M, K), tile = size, grid.tile
    across = pl.cdiv(K, tile.cols)
    g = pid // (down * across)
    i, j = panel_order(pid % (down * across), down, across, tile.panel)
    zero = jnp.zeros((1,) * 6, jnp.int32)
    rows, block = i * tile.rows + grid.rows, zero + i
    rows_in = rows_t_in = None if M % tile.rows == 0 else rows < M
    rows_t = rows
    if "tiles" in ref:
        start, end, block = (
            plgpu.load(ref["tiles"].at[zero + n * (ref["tiles"].shape[0] // SCHEDULED) + i]) for n in (1, 2, 3)
        )
        rows = start + grid.rows
        rows_in = rows < end
        # A tile outside the groups is in no column. Of a group's last tile all columns are written: zeros fill them up.
        rows_t_in = (block >= 0) & (block < ref["values_t"].shape[1] // BLOCK)
        rows_t = jnp.maximum(block, 0) * BLOCK + grid.rows
    columns, blocks = j * tile.cols + grid.columns, j * (tile.cols // grid.width) + grid.blocks
    cut = K % tile.cols != 0
    columns_in, blocks_in = (columns < K, blocks < pl.cdiv(K, BLOCK)) if cut else (None, None)
    return Place(
        g,
        zero + (pid % (down * across)) == 0,
        rows,
        rows_in,
        rows_t,
        rows_t_in,
        block,
        columns,
        columns_in,
        blocks,
        blocks_in,
    )


def _find_factors(
    ref: dict, spec: Spec, sizes: jax.Array, place: Place, size: tuple[int, int, int]
) -> tuple[jax.Array | None, jax.Array | None]:
    """What the row layout's and the column layout's values are multiplied by; stores the scales that belong to this tile."""
    (G, M, K), p, g = size, place, place.g

    def scale_of(amax):
        return scale_and_factor(amax, spec.fp8, spec.pow2)

    if spec.scaling == "tensorwise":
        n = ref["amax"].shape[0] // G
        part = jnp.arange(power_of_2(n), dtype=jnp.int32)
        amax = jnp.max(plgpu.load(ref["amax"].at[g * n + part], mask=part < n, other=0.0))
        scale, factor = scale_of(jnp.broadcast_to(amax, (1,) * 6))
        store(ref["scales"], (jnp.zeros_like(p.block) + g,), scale, p.first)
        return factor, factor
    if "row_factors" in ref or "col_factors" in ref:
        row = load(ref["row_factors"], (g * M + p.rows,), p.rows_in) if spec.row else None
        col = load(ref["col_factors"], (g * K + p.columns,), p.columns_in) if spec.col else None
        return row, col
    if spec.scaling == "rowwise":
        scale, factor = scale_of(largest(sizes, COLUMNS))
        store(ref["scales"], (g * M + p.rows,), scale, p.rows_in)
        return factor, factor
    across, down = pl.cdiv(K, BLOCK), (ref["values_t"].shape[1] if "tiles" in ref else M) + BLOCK - 1
    down //= BLOCK
    if spec.scaling == "block_128x128":
        scale, factor = scale_of(largest(sizes, (*COLUMNS, *ROWS)))
        if spec.row:
            store(ref["scales"], (g * down + p.block, p.blocks), scale, p.blocks_in)
        if spec.col:
            store(ref["scales_t"], (g * across + p.blocks, p.block), scale, p.blocks_in)
        return factor, factor
    row = col = None
    if spec.row:
        scale, row = scale_of(largest(sizes, COLUMNS))
        store(ref["scales"], (g * across + p.blocks, p.rows), scale, both(p.rows_in, p.blocks_in))
    if spec.col:
        scale, col = scale_of(largest(sizes, ROWS))
        there = None if "tiles" not in ref else p.rows_t_in
        store(ref["scales_t"], (g * down + p.block, p.columns), scale, both(p.columns_in, there))
    return row, col


def _cast_kernel(
    *refs, names: tuple[str, ...], spec: Spec, grid: Grid, size: tuple[int, int, int], down: int, interpret: bool
):
    ref = dict(zip(names, refs, strict=True))
    G, M, K = size
    pid = pl.program_id(0)
    if spec.scaling == "tensorwise":
        pid = (
            G * down * pl.cdiv(K, grid.tile.cols) - 1 - pid
        )  # backwards: what the pass before has read last is still in L2
    p = _find_place(ref, pid, grid, size, down)
    x = infinity_to_nan(load(ref["x"], (p.g * M + p.rows, p.columns), both(p.rows_in, p.columns_in)))
    sizes = sizes_of(x, interpret)
    if "now" in ref:
        store(ref["now"], (jnp.zeros_like(p.block) + pid,), without_nan(largest(sizes, (*COLUMNS, *ROWS, 2))), None)
    factors = _find_factors(ref, spec, sizes, p, size)
    random = None
    if "words" in ref:
        row_word, column_word = (plgpu.load(ref["words"].at[jnp.full((1,) * 6, n, jnp.int32)]) for n in range(2))
        random = random_bits(p.g * M + p.rows, p.columns, (row_word, column_word))

    def cast(factor):
        values = x * factor
        return (
            cast_saturating(values, spec.fp8, saturates=not interpret)
            if random is None
            else cast_stochastic(values, spec.fp8, random)
        )

    if spec.row:
        store(ref["values"], (p.g * M + p.rows, p.columns), cast(factors[0]), both(p.rows_in, p.columns_in))
    if spec.col:
        store(ref["values_t"], (p.g * K + p.columns, p.rows_t), cast(factors[1]), both(p.columns_in, p.rows_t_in))


@traced_once("spec", "tile", "interpret")
def cast_pallas(
    spec: Spec, tile: Tiles, arrays: Arrays, factors: dict[str, jax.Array], *, interpret: bool
) -> dict[str, jax.Array]:
    """By name, as far as they are wanted: values, scales, values_t, scales_t as in `Quantized`, all with a leading G. No size is 0.

    Args:
      factors: of the passes before: amax [G, parts] (tensorwise), row_factors [G, M], col_factors [G, K] (rowwise); else {}. What has such a factor gets
        no scales here, but for the tensorwise ones [G].
    """
    x, offsets, _, words = arrays
    G, M, K = x.shape
    across, heights = pl.cdiv(K, BLOCK), pl.cdiv(M, BLOCK)
    down, M_t = pl.cdiv(M, tile.rows), M
    operands = {"x": x.reshape(G * M, K)} | {name: value.reshape(-1) for name, value in factors.items()}
    if offsets is not None and spec.col:
        groups = offsets.shape[0] - 1
        down, M_t = tile_bound(M, groups, tile.rows), padded_rows(M, groups)
        heights = M_t // BLOCK
        operands["tiles"] = schedule_rows(offsets, M, tile.rows, interpret)
    if words is not None:
        operands["words"] = words
    fp8, f32 = jnp.dtype(spec.fp8), jnp.dtype("float32")
    outs = {"values": ((G * M, K), fp8)} if spec.row else {}
    outs |= {"values_t": ((G * K, M_t), fp8)} if spec.col else {}
    shapes = {
        "tensorwise": {"scales": (G,)},
        "rowwise": {} if factors else {"scales": (G * M,)},
        "block_1x128": {"scales": (G * across, M), "scales_t": (G * heights, K)},
        "block_128x128": {"scales": (G * heights, across), "scales_t": (G * across, heights)},
    }[spec.scaling]
    wanted = {"scales": spec.row or spec.scaling == "tensorwise", "scales_t": spec.col}
    outs |= {name: (shape, f32) for name, shape in shapes.items() if wanted[name]}
    programs = G * down * pl.cdiv(K, tile.cols)
    outs |= {"now": ((programs,), f32)} if spec.measure and arrays.amax is not None else {}
    grid = Grid.of(tile, x.dtype.itemsize, by_blocks=spec.scaling == "block_1x128" and spec.row)
    found = launch(
        functools.partial(
            _cast_kernel, names=(*operands, *outs), spec=spec, grid=grid, size=(G, M, K), down=down, interpret=interpret
        ),
        *operands.values(),
        out=[out_struct(shape, dtype, like=x) for shape, dtype in outs.values()],
        grid=(programs,),
        warps=tile.warps,
        interpret=interpret,
        name="quantize_cast",
    )
    results = {name: value.reshape(G, -1, *value.shape[1:]) for name, value in zip(outs, found, strict=True)}
    return results | ({"scales": results["scales"][:, 0]} if spec.scaling == "tensorwise" else {})
