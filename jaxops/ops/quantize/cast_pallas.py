"""The kernel of every cast (Pallas on Triton): one read of each tile of its sources, the tensors computed from them,
their scales, and their values in every layout."""

import dataclasses
import functools
import math
from typing import Any

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
)
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.pallas.masked_pallas import both, load, store
from jaxops._lib.pallas.schedule_pallas import schedule_rows
from jaxops._lib.planning.costs import bytes_of
from jaxops._lib.planning.traced_once import traced_once
from jaxops._lib.ragged.offsets import padded_rows
from jaxops._lib.ragged.tiling import tile_bound
from jaxops.ops.quantize.outputs import Computation, Operands, itemsize_of, size_of
from jaxops.ops.quantize.plan import Tiles
from jaxops.ops.quantize.tile_pallas import (
    BLOCKS,
    COLUMNS,
    ROWS,
    Grid,
    Location,
    abs_for_max,
    inside,
    locate,
    read,
    refs_of,
)


@dataclasses.dataclass(frozen=True)
class _Cast:
    """The cast of a tile of output n.

    Attributes:
      pid: the tile's number.
      size: [G, M, K] of each tensor.
      columns: of its column layout: M, or those of padded groups.
      random: bits of stochastic rounding, or None.
    """

    computation: Computation
    n: int
    ref: dict
    grid: Grid
    p: Location
    pid: jax.Array
    size: tuple[int, int, int]
    columns: int
    random: jax.Array | None
    interpret: bool

    @property
    def output(self):
        return self.computation.outputs[self.n]

    def _scale_of(self, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.output.form.scale_and_factor(amax, is_bfloat16=self.computation.dtype == "bfloat16")

    def given(self) -> jax.Array | None:
        """The factor that is known before the tile: of a whole tensor."""
        ref, n, p = self.ref, self.n, self.p
        if f"factor{n}" in ref:
            return ref[f"factor{n}"]
        if f"amax{n}" not in ref:
            return None
        parts = ref[f"amax{n}"].shape[0] // self.size[0]
        part = jnp.arange(power_of_2(parts), dtype=jnp.int32)
        amax = jnp.max(plgpu.load(ref[f"amax{n}"].at[p.g * parts + part], mask=part < parts, other=0.0))
        amax = jnp.broadcast_to(amax, p.block.shape)
        scale, factor = self.output.form.scale_and_factor(amax)  # a given amax is any float32
        store(ref[f"scales{n}"], (jnp.zeros_like(p.block) + p.g,), scale, p.is_first)
        return factor

    def row_factors(self, parts: range, sizes: list[jax.Array]) -> list[jax.Array]:
        """The factor of each part's values in the row layout; stores this tile's scales."""
        ref, n, p, grid, (_, M, K) = self.ref, self.n, self.p, self.grid, self.size
        if f"row_factors{n}" in ref:
            return [load(ref[f"row_factors{n}"], (p.g * M + p.rows,), p.rows_in)]
        if self.output.scaling == "rowwise":
            largest = [grid.largest(size, *COLUMNS, *BLOCKS) for size in sizes]
            scale, factor = self._scale_of(functools.reduce(jnp.maximum, largest))
            store(ref[f"scales{n}"], (p.g * M + p.rows,), scale, p.rows_in)
            return [factor] * len(parts)
        across, factors = pl.cdiv(K, BLOCK), []
        for part, size in zip(parts, sizes, strict=True):
            scale, factor = self._scale_of(grid.largest(size, *COLUMNS))
            at = (p.g * across + part * across + p.blocks, p.rows)
            store(ref[f"scales{n}"], at, scale, both(p.rows_in, p.blocks_in))
            factors.append(factor)
        return factors

    def col_factor(self, part: int, size: jax.Array) -> jax.Array:
        """The factor of a part's values in the column layout; stores this tile's scales."""
        ref, n, p, grid, (_, _, K) = self.ref, self.n, self.p, self.grid, self.size
        if f"col_factors{n}" in ref:
            return load(ref[f"col_factors{n}"], (p.g * K + p.columns,), p.columns_in)
        scale, factor = self._scale_of(grid.largest(size, *ROWS))
        at = (p.g * pl.cdiv(self.columns, BLOCK) + p.block, p.columns)
        store(ref[f"scales_t{n}_{part}"], at, scale, both(p.columns_in, p.block_in))
        return factor

    def block_factor(self, size: jax.Array) -> jax.Array:
        """The factor of blocks of 128x128, for both layouts; stores this tile's scales."""
        ref, n, p, (_, M, K) = self.ref, self.n, self.p, self.size
        scale, factor = self._scale_of(self.grid.largest(size, *COLUMNS, *ROWS))
        if self.output.row:
            store(ref[f"scales{n}"], (p.g * pl.cdiv(M, BLOCK) + p.block, p.blocks), scale, p.blocks_in)
        if self.output.col:
            store(ref[f"scales_t{n}_0"], (p.g * pl.cdiv(K, BLOCK) + p.blocks, p.block), scale, p.blocks_in)
        return factor

    def _cast(self, values: jax.Array, arranged=lambda tile: tile) -> jax.Array:
        if self.random is None:
            return cast_saturating(arranged(values), self.output.form.dtype, saturates=not self.interpret)
        return cast_stochastic(arranged(values), self.output.form.dtype, arranged(self.random))

    def store(self, parts: range, tensors: list[jax.Array]) -> None:
        """Stores this tile of some parts, which share what they have in scales."""
        output, ref, n, p, grid, (_, M, K) = self.output, self.ref, self.n, self.p, self.grid, self.size
        if output.plain:
            for part, x in zip(parts, tensors, strict=True):
                store(ref[f"plain{n}_{part}"], (p.rows, p.columns), x, both(p.rows_in, p.columns_in))
        if output.layouts == "none":
            return
        given, computed = self.given(), self.computation.compute is not None
        # With a given factor in pairs, the gated unit's backward would have so many registers that one program ran at
        # once.
        values = [infinity_to_nan(x, in_pairs=given is None or not computed) for x in tensors]
        sizes = [abs_for_max(x, self.interpret) for x in values]
        if "measured" in ref:
            amax = nan_to_zero(grid.largest(sizes[0], *COLUMNS, *ROWS, *BLOCKS))
            store(ref["measured"], (jnp.zeros_like(p.block) + self.pid,), amax)
        if output.scaling == "block_128x128":
            given = self.block_factor(sizes[0])
        rows: list[Any] = [given] * len(parts)
        cols = rows
        if given is None and output.row:
            rows = self.row_factors(parts, sizes)
        if given is None and output.col and not computed:
            cols = [self.col_factor(part, size) for part, size in zip(parts, sizes, strict=True)]
        if output.row:
            for part, x, factor in zip(parts, values, rows, strict=True):
                at = (p.g * M + p.rows, part * K + p.columns)
                store(ref[f"values{n}"], at, self._cast(x * factor), both(p.rows_in, p.columns_in))
        if output.col:
            for i, (part, x) in enumerate(zip(parts, values, strict=True)):
                factor = self.col_factor(part, sizes[i]) if given is None and computed else cols[i]
                at = (p.g * K + p.columns_t, p.rows_t)
                store(ref[f"values_t{n}_{part}"], at, self._cast(x * factor, grid.transposed), p.t_in)


def _cast_kernel(
    ref: dict, *, computation: Computation, grid: Grid, size: tuple[int, int, int], down: int, columns: int,
    interpret: bool,
) -> None:  # fmt: skip
    G, M, K = size
    pid = pl.program_id(0)
    if computation.measured:  # from the end, which the pass before has left in L2
        pid = G * down * pl.cdiv(K, grid.tiles.cols) - 1 - pid
    p = locate(ref.get("tiles"), pid, grid, size, down, columns // BLOCK)
    if computation.compute is not None:  # of one tensor; with a known 0, `quantize` took up to 1.05 times as long
        p = dataclasses.replace(p, g=0)
    if "Gathered" in computation.kinds:  # no tile outside the groups is read
        p = dataclasses.replace(p, rows_in=both(p.rows_in, p.block_in))
    if "offsets" in ref:
        p = dataclasses.replace(p, rows_in=both(p.rows_in, inside(ref["offsets"], p.rows)))
    # With the operands: between the stores the threads would wait for each.
    factors = {name: load(x, (grid.index(0),)) for name, x in ref.items() if name.startswith("factor")}
    rows = p.g * M + p.rows
    tensors, addends = read(ref, computation, grid, (rows, p.columns), p.rows_in, p.columns_in, p.j)
    for i, x in enumerate(addends):
        store(ref[f"sums{i}"], (grid.index(p.j), p.rows), grid.summed(x, *COLUMNS, *BLOCKS), p.rows_in)
    random = None
    if "words" in ref:
        words = [plgpu.load(ref["words"].at[grid.index(n)]) for n in range(2)]
        random = random_bits(rows, p.columns, (words[0], words[1]))
    numbers = computation.tensors()
    for n, parts in computation.steps():
        cast = _Cast(computation, n, ref | factors, grid, p, pid, size, columns, random, interpret)
        cast.store(parts, [tensors[numbers.index((n, part))] for part in parts])


def _results(
    computation: Computation, size: tuple[int, int, int], columns: int, tiles: Tiles, given: dict
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each result, stacks as one matrix."""
    (G, M, K), results = size, {}
    across, row_blocks = pl.cdiv(K, BLOCK), pl.cdiv(columns, BLOCK)
    for i in range(computation.sums):
        results[f"sums{i}"] = ((pl.cdiv(K, tiles.cols), M), "float32")
    for n, output in enumerate(computation.outputs):
        scales, scales_t = {
            "tensorwise": ((G,) if f"amax{n}" in given else None, None),
            "rowwise": (None if f"row_factors{n}" in given or not output.row else (G * M,), None),
            "block_1x128": ((G * output.parts * across, M) if output.row else None, (G * row_blocks, K)),
            "block_128x128": ((G * row_blocks, across) if output.row else None, (G * across, row_blocks)),
        }[output.scaling]
        if output.row:
            results[f"values{n}"] = ((G * M, output.parts * K), output.form.dtype)
        if scales and output.layouts != "none":
            results[f"scales{n}"] = (scales, "float32")
        for part in range(output.parts):
            if output.col:
                results[f"values_t{n}_{part}"] = ((G * K, columns), output.form.dtype)
                if scales_t:
                    results[f"scales_t{n}_{part}"] = (scales_t, "float32")
            if output.plain:
                results[f"plain{n}_{part}"] = ((M, K), computation.dtype)
    return results


@traced_once("computation", "tiles", "measure", "interpret")
def cast_pallas(
    computation: Computation, tiles: Tiles, operands: Operands, offsets: jax.Array | None,
    given: dict[str, jax.Array], *, measure: bool = False, interpret: bool,
) -> dict[str, jax.Array]:  # fmt: skip
    """By name: for output n values{n} and scales{n}, for its parts values_t{n}_{part}, scales_t{n}_{part} and
    plain{n}_{part}, as `Output` asks, stacks as one matrix; sums{i}: parts [cdiv(K, tiles.cols), M]; with measure
    measured, the largest magnitude of each tile. No size is 0.

    Args:
      offsets: [groups + 1] int32, or None.
      given: words [2] of stochastic rounding; for output n what is known of its scales: amax{n} [G * parts], of which
        the scales are made and written; factor{n} [1]; row_factors{n} [G * M] and col_factors{n} [G * K].
    """
    G, M, K = size = size_of(operands)
    named: dict[str, jax.Array | None] = {**refs_of(operands), **given}
    down, columns, unused = pl.cdiv(M, tiles.rows), M, 0
    computed = computation.compute is not None
    if computed:
        named["offsets"] = offsets
    if offsets is not None and computation.col:
        groups = offsets.shape[0] - 1
        down, columns = tile_bound(M, groups, tiles.rows), padded_rows(M, groups)
        # A tile knows its rows: it does not read the offsets. Rows outside the groups have results of `quantize` only.
        spans = ((1, groups + 1),) if computed else ()
        named |= {"tiles": schedule_rows(offsets, M, tiles.rows, interpret, spans), "offsets": None}
        # Bytes of the columns and scales that are not written unless every group ends in a partial block.
        of_column = [
            output.parts * (BLOCK + 4 * (output.scaling == "block_1x128"))
            for output in computation.outputs
            if output.col
        ]
        unused = groups * K * sum(of_column)
    programs = G * down * pl.cdiv(K, tiles.cols)
    like: Any = next(iter(named.values()))
    wanted = _results(computation, size, columns, tiles, given)
    if measure:
        wanted["measured"] = ((programs,), "float32")
    results = {name: out_struct(shape, jnp.dtype(dtype), like=like) for name, (shape, dtype) in wanted.items()}
    by_blocks = any(output.scaling == "block_1x128" and output.row for output in computation.outputs)
    grid = Grid.of(tiles, itemsize_of(operands), by_blocks)
    return launch_named(
        functools.partial(
            _cast_kernel, computation=computation, grid=grid, size=size, down=down, columns=columns, interpret=interpret
        ),
        named,
        results,
        grid=(programs,),
        warps=tiles.warps,
        interpret=interpret,
        name="quantize_computed_cast" if computed else "quantize_cast",
        flops=computation.flops_of_element(known=bool(given.keys() - {"words"})) * math.prod(size),
        bytes_accessed=bytes_of(*named.values(), *results.values()) - unused,
    )
