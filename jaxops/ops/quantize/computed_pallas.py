"""Tensors that are computed from others, element by element, and cast to FP8 in the same pass (Pallas on Triton)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.numerics.fp8 import (
    BLOCK,
    Quantized,
    cast_saturating,
    infinity_to_nan,
    nan_to_zero,
    scale_and_factor,
)
from jaxops._lib.numerics.instructions import widened
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.pallas.masked_pallas import both, load, store
from jaxops._lib.pallas.schedule_pallas import schedule_rows
from jaxops._lib.planning.costs import bytes_of
from jaxops._lib.planning.traced_once import traced_once
from jaxops._lib.ragged.offsets import padded_rows
from jaxops._lib.ragged.tiling import panel_order, tile_bound
from jaxops.ops.quantize.outputs import Computation, Computed, Halves, Output
from jaxops.ops.quantize.plan import Tiles
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

Operands = tuple[Any, ...]  # matrices [R, C], Halves [R, 2 * C], vectors [R]


def arrays_of(operands: Operands) -> list[jax.Array]:
    return [operand.x if isinstance(operand, Halves) else operand for operand in operands]


def size_of(operands: Operands) -> tuple[int, int]:
    """R and C."""
    for operand in operands:
        if isinstance(operand, Halves):
            return operand.x.shape[0], operand.x.shape[1] // 2
        if operand.ndim == 2:
            return operand.shape
    raise ValueError("one of the operands must be a matrix [R, C], or Halves of one [R, 2 * C].")


def _computed(
    ref: dict, computation: Computation, C: int, rows: jax.Array, columns: jax.Array, rows_in: Mask, columns_in: Mask
) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """The tile's tensors, rounded to the dtype in which they would be stored, and those to be added up, in float32.

    All are zeros where a mask does not hold: operands are, and `compute` of zeros is zero.
    """
    tiles = []
    for n, kind in enumerate(ref["kinds"]):
        x = ref[f"operand{n}"]
        if kind == "vector":
            tiles.append(load(x, (rows,), rows_in))
        else:
            firsts = (0, C) if kind == "halves" else (0,)
            tiles += [load(x, (rows, first + columns), both(rows_in, columns_in)) for first in firsts]
    tensors, addends = computation.compute(*map(widened, tiles))
    return [tensor.astype(computation.dtype) for tensor in tensors], addends


def _amax_kernel(
    ref: dict, *, computation: Computation, grid: Grid, programs: int, size: tuple[int, int], interpret: bool
):
    """Program p of P takes tiles p, p + P, ...: at the end L2 holds the end of the operands."""
    (R, C), tiles, p = size, grid.tiles, pl.program_id(0)
    across = pl.cdiv(C, tiles.cols)
    count = pl.cdiv(R, tiles.rows) * across
    numbers = [n for n, output in enumerate(computation.outputs) if output.measured]

    def step(n, most):
        t = n * programs + p
        rows, columns = t // across * tiles.rows + grid.rows, t % across * tiles.cols + grid.columns
        rows_in = rows < R  # false past the last tile
        if "offsets" in ref:
            rows_in = rows_in & inside(ref["offsets"], rows)
        columns_in = None if C % tiles.cols == 0 else columns < C
        tensors, _ = _computed(ref, computation, C, rows, columns, rows_in, columns_in)
        found: dict[int, Any] = dict.fromkeys(numbers)
        for (output, _), x in zip(computation.tensors(), tensors, strict=True):
            if output in found:
                # Of a thread's neighbours one number is kept: the loop carries an eighth of the registers.
                size, before = grid.largest(abs_for_max(infinity_to_nan(x), interpret), "vector"), found[output]
                found[output] = size if before is None else jnp.maximum(before, size)
        return [jnp.maximum(a, b) for a, b in zip(most, found.values(), strict=True)]

    kept = tuple(1 if axis == "vector" else n for axis, n in zip(grid.axes, grid.shape, strict=True))
    most = lax.fori_loop(0, pl.cdiv(count, programs), step, [jnp.zeros(kept, jnp.float32) for _ in numbers])
    for i, x in enumerate(most):
        store(ref["amax"], (grid.index(i), grid.index(p)), nan_to_zero(grid.largest(x, *COLUMNS, *ROWS, *BLOCKS)))


def _named(operands: Operands, offsets: jax.Array | None) -> tuple[dict[str, jax.Array | None], list[str]]:
    """Operands by their names in a kernel, and what each is."""
    kinds = ["halves" if isinstance(x, Halves) else "vector" if x.ndim == 1 else "matrix" for x in operands]
    named: dict[str, jax.Array | None] = {f"operand{n}": x for n, x in enumerate(arrays_of(operands))}
    return named | {"offsets": offsets}, kinds


def _grid_of(computation: Computation, tiles: Tiles, operands: Operands, by_blocks: bool) -> Grid:
    itemsize = max(x.dtype.itemsize for x in arrays_of(operands) if x.ndim == 2)
    return Grid.of(tiles, itemsize, by_blocks)


@traced_once("computation", "tiles", "interpret")
def computed_amax_pallas(
    computation: Computation, tiles: Tiles, operands: Operands, offsets: jax.Array | None, *, interpret: bool
) -> jax.Array:
    """[outputs that are measured] float32: each one's largest magnitude, over the rows in groups if there are
    offsets."""
    R, C = size_of(operands)
    programs = min(tiles.programs, pl.cdiv(R, tiles.rows) * pl.cdiv(C, tiles.cols))
    named, kinds = _named(operands, offsets)
    count = sum(output.measured for output in computation.outputs)
    grid = _grid_of(computation, tiles, operands, by_blocks=False)
    kernel = functools.partial(
        _amax_kernel, computation=computation, grid=grid, programs=programs, size=(R, C), interpret=interpret
    )
    parts = launch_named(
        lambda ref: kernel(ref | {"kinds": kinds}),
        named,
        {"amax": out_struct((count, programs), jnp.float32, like=arrays_of(operands)[0])},
        grid=(programs,),
        warps=tiles.warps,
        interpret=interpret,
        name="quantize_computed_amax",
        flops=_flops(computation, R * C),
    )["amax"]
    return jnp.max(parts, axis=1)


def _flops(computation: Computation, elements: int) -> int:
    """Of each tensor, about four operations to compute it, its magnitude and a comparison."""
    return 6 * len(computation.tensors()) * elements


def _row_factors(
    ref: dict,
    computation: Computation,
    n: int,
    parts: range,
    sizes: list[jax.Array],
    grid: Grid,
    p: Location,
    C: int,
) -> list[jax.Array]:
    """The factor of each part's values in the row layout; stores this tile's scales."""
    output: Output = computation.outputs[n]
    how: Any = {"dtype": output.fp8, "pow2": computation.pow2, "is_bfloat16": computation.dtype == "bfloat16"}
    if output.scaling == "rowwise":
        found = [grid.largest(size, *COLUMNS, *BLOCKS) for size in sizes]
        scale, factor = scale_and_factor(functools.reduce(jnp.maximum, found), **how)
        store(ref[f"scales{n}"], (p.rows,), scale, p.rows_in)
        return [factor] * len(parts)
    factors = []
    for part, size in zip(parts, sizes, strict=True):
        scale, factor = scale_and_factor(grid.largest(size, *COLUMNS), **how)
        at = (part * pl.cdiv(C, BLOCK) + p.blocks, p.rows)
        store(ref[f"scales{n}"], at, scale, both(p.rows_in, p.blocks_in))
        factors.append(factor)
    return factors


def _cast_parts(
    ref: dict, computation: Computation, n: int, parts: range, tensors: list[jax.Array], given: jax.Array | None,
    grid: Grid, p: Location, C: int, interpret: bool,
) -> None:  # fmt: skip
    """Stores this tile of some parts of output n, whose factor may be given."""
    output: Output = computation.outputs[n]
    if output.plain:
        for part, x in zip(parts, tensors, strict=True):
            store(ref[f"plain{n}_{part}"], (p.rows, p.columns), x, both(p.rows_in, p.columns_in))
    if output.layouts == "none":
        return
    # With a given factor in pairs, the gated unit's backward would have so many registers that one program ran at once.
    values = [infinity_to_nan(x, in_pairs=given is None) for x in tensors]

    def cast(x):
        return cast_saturating(x, output.fp8, saturates=not interpret)

    sizes = [abs_for_max(x, interpret) for x in values] if given is None else None
    if output.row:
        factors: list[Any] = [given] * len(parts)
        if sizes:
            factors = _row_factors(ref, computation, n, parts, sizes, grid, p, C)
        for part, x, factor in zip(parts, values, factors, strict=True):
            at = (p.rows, part * C + p.columns)
            store(ref[f"values{n}"], at, cast(x * factor), both(p.rows_in, p.columns_in))
    if output.col:
        for i, (part, x) in enumerate(zip(parts, values, strict=True)):
            factor: Any = given
            if sizes:
                amax = grid.largest(sizes[i], *ROWS)
                scale, factor = scale_and_factor(amax, output.fp8, computation.pow2, computation.dtype == "bfloat16")
                store(ref[f"scales_t{n}_{part}"], (p.block, p.columns), scale, both(p.columns_in, p.block_in))
            at = (p.columns_t, p.rows_t)
            store(ref[f"values_t{n}_{part}"], at, cast(grid.transposed(x * factor)), p.t_in)


def _cast_kernel(ref: dict, *, computation: Computation, grid: Grid, size: tuple[int, int], down: int, interpret: bool):
    (R, C), pid = size, pl.program_id(0)
    across = pl.cdiv(C, grid.tiles.cols)
    if any(output.measured for output in computation.outputs):  # from the end, which the pass before has left in L2
        pid = down * across - 1 - pid
    columns_of = [name for name in ref if name.startswith("values_t")]
    scheduled = {"tiles": ref["tiles"], "values_t": ref[columns_of[0]]} if columns_of else {}
    p = locate(scheduled, pid, grid, (1, R, C), down)
    rows_in = p.rows_in
    if "offsets" in ref:
        rows_in = both(rows_in, inside(ref["offsets"], p.rows))
    p = dataclasses.replace(p, rows_in=rows_in)
    # With the operands: between the stores the threads would wait for each.
    factors = {
        n: load(ref[f"factor{n}"], (grid.index(0),)) for n, output in enumerate(computation.outputs) if output.measured
    }
    tensors, addends = _computed(ref, computation, C, p.rows, p.columns, p.rows_in, p.columns_in)
    _, j = panel_order(pid, down, across, grid.tiles.panel)
    for i, x in enumerate(addends):
        store(ref[f"sums{i}"], (grid.index(j), p.rows), grid.summed(x, *COLUMNS, *BLOCKS), p.rows_in)
    numbers = computation.tensors()
    for n, parts in computation.steps():
        mine = [tensors[numbers.index((n, part))] for part in parts]
        _cast_parts(ref, computation, n, parts, mine, factors.get(n), grid, p, C, interpret)


def _results(
    computation: Computation, size: tuple[int, int], M_t: int, tiles: Tiles
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each result of the cast."""
    (R, C), found = size, {}
    for i in range(computation.sums):
        found[f"sums{i}"] = ((pl.cdiv(C, tiles.cols), R), "float32")
    for n, output in enumerate(computation.outputs):
        blocks = output.parts * pl.cdiv(C, BLOCK)
        if output.row:
            found[f"values{n}"] = ((R, output.parts * C), output.fp8)
            if output.scaling != "tensorwise":
                found[f"scales{n}"] = ((R,) if output.scaling == "rowwise" else (blocks, R), "float32")
        for part in range(output.parts):
            if output.col:
                found[f"values_t{n}_{part}"] = ((C, M_t), output.fp8)
                if output.scaling != "tensorwise":
                    found[f"scales_t{n}_{part}"] = ((M_t // BLOCK, C), "float32")
            if output.plain:
                found[f"plain{n}_{part}"] = ((R, C), computation.dtype)
    return found


@traced_once("computation", "tiles", "interpret")
def computed_cast_pallas(
    computation: Computation,
    tiles: Tiles,
    operands: Operands,
    offsets: jax.Array,
    amax: jax.Array | None,
    *,
    interpret: bool,
) -> tuple[tuple[Computed, ...], tuple[jax.Array, ...]]:
    """The results, and the partial sums [cdiv(C, tiles.cols), R]. No size is 0.

    Args:
      offsets: [G + 1] int32.
      amax: of the outputs that are measured, float32; None without such.
    """
    R, C = size_of(operands)
    named, kinds = _named(operands, offsets)
    M_t, down, unused = 0, pl.cdiv(R, tiles.rows), 0
    if computation.col:
        groups = offsets.shape[0] - 1
        down, M_t = tile_bound(R, groups, tiles.rows), padded_rows(R, groups)
        # Tiles of rows in groups only. A tile knows its rows: it does not read the offsets.
        named |= {"tiles": schedule_rows(offsets, R, tiles.rows, interpret, ((1, groups + 1),)), "offsets": None}
        # Bytes of the columns and scales that are not written unless every group ends in a partial block.
        a_part = [BLOCK + 4 * (output.scaling == "block_1x128") for output in computation.outputs if output.col]
        parts = [output.parts for output in computation.outputs if output.col]
        unused = groups * C * sum(a * b for a, b in zip(a_part, parts, strict=True))
    scales = {}
    measured = [n for n, output in enumerate(computation.outputs) if output.measured]
    for i, n in enumerate(measured):
        assert amax is not None
        scales[n], factor = scale_and_factor(amax[i], computation.outputs[n].fp8, computation.pow2)
        named[f"factor{n}"] = factor[None]
    like = arrays_of(operands)[0]
    wanted = _results(computation, (R, C), M_t, tiles)
    results = {name: out_struct(shape, jnp.dtype(dtype), like=like) for name, (shape, dtype) in wanted.items()}
    by_blocks = any(output.scaling == "block_1x128" and output.row for output in computation.outputs)
    grid = _grid_of(computation, tiles, operands, by_blocks)
    kernel = functools.partial(
        _cast_kernel, computation=computation, grid=grid, size=(R, C), down=down, interpret=interpret
    )
    found = launch_named(
        lambda ref: kernel(ref | {"kinds": kinds}),
        named,
        results,
        grid=(down * pl.cdiv(C, tiles.cols),),
        warps=tiles.warps,
        interpret=interpret,
        name="quantize_computed_cast",
        flops=_flops(computation, R * C),
        bytes_accessed=bytes_of(*named.values(), *results.values()) - unused,
    )
    return _as_results(computation, found, scales, offsets)


def _as_results(
    computation: Computation, found: dict[str, jax.Array], scales: dict[int, jax.Array], offsets: jax.Array
) -> tuple[tuple[Computed, ...], tuple[jax.Array, ...]]:
    computed = []
    for n, output in enumerate(computation.outputs):
        parts = range(output.parts)
        how: Any = {"scaling": output.scaling, "dtype": computation.dtype, "group_offsets": offsets}
        row, cols = None, ()
        if output.row:
            row = Quantized(found[f"values{n}"], scales.get(n, found.get(f"scales{n}")), **how)
        if output.col:
            pairs = [(found[f"values_t{n}_{i}"], scales.get(n, found.get(f"scales_t{n}_{i}"))) for i in parts]
            cols = tuple(Quantized(None, None, *pair, **how) for pair in pairs)
        plain = tuple(found[f"plain{n}_{i}"] for i in parts) if output.plain else ()
        computed.append(Computed(row, cols, plain))
    return tuple(computed), tuple(found[f"sums{i}"] for i in range(computation.sums))
