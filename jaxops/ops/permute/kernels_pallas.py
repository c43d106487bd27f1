"""permute, combine and combine's backward as Pallas kernels lowered through Triton, and what they share: a program's
tokens and columns, and batches of the tokens' choices. No atomics: a row belongs to at most one choice.

Register arrays have the axes choice, token, column. Triton lays warps along the last axes first, so a sum over choices
stays in each thread.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.pallas.launch_pallas import launch
from jaxops._lib.pallas.masked_pallas import load, store
from jaxops._lib.planning.traced_once import traced_once
from jaxops._lib.ragged.offsets import clip_bounds
from jaxops.ops.permute.plan import Tiles
from jaxops.ops.route import Routing

Columns = tuple[jax.Array, jax.Array | None]  # numbers [1, 1, block], and which are less than D, or None for all


def columns_of(chunk: Any, D: int, block: int) -> Columns:
    number = chunk * block + jnp.arange(block, dtype=jnp.int32)[None, None, :]
    return number, None if D % block == 0 else number < D


def _mask(row_in: jax.Array, columns: Columns) -> jax.Array:
    number, inside = columns
    shape = (*row_in.shape[:2], number.shape[2])
    mask = jnp.broadcast_to(row_in, shape)
    return mask if inside is None else mask & jnp.broadcast_to(inside, shape)


def load_rows(ref, row: jax.Array, row_in: jax.Array, columns: Columns) -> jax.Array:
    """ref[row] in ref's dtype, zero where row_in is false. row, row_in: [choices or 1, rows, 1]."""
    return plgpu.load(ref.at[row, columns[0]], mask=_mask(row_in, columns), other=0)


def store_rows(ref, row: jax.Array, row_in: jax.Array, columns: Columns, values: jax.Array) -> None:
    mask = _mask(row_in, columns)
    plgpu.store(ref.at[row, columns[0]], jnp.broadcast_to(values, mask.shape).astype(ref.dtype), mask=mask)


@dataclasses.dataclass(frozen=True)
class Choices:
    """A batch of choices of a program's tokens.

    Attributes:
      token, choice: [1, rows, 1] and [batch, 1, 1], their numbers.
      exists: [batch, rows, 1], false in padding.
      has_row: which of those have a row in a group.
      position: that row; R for the others. Masked elements index one past the end: a GPU ignores them, but Pallas'
        interpreter stores the old value there.
    """

    token: jax.Array
    choice: jax.Array
    exists: jax.Array
    has_row: jax.Array
    position: jax.Array

    @property
    def at(self) -> tuple[jax.Array, ...]:
        """Where these choices are in an array [T, k]."""
        return tuple(jnp.broadcast_to(index, self.exists.shape) for index in (self.token, self.choice))


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A program's tokens [1, rows, 1] and which of them exist; lo and hi, the first row and the end of all groups."""

    tile: Tiles
    positions_ref: Any
    number: jax.Array
    exists: jax.Array
    lo: jax.Array
    hi: jax.Array

    @classmethod
    def of_program(cls, number, tile: Tiles, positions_ref, offsets_ref) -> "Tokens":
        T, k = positions_ref.shape
        first, end = (plgpu.load(offsets_ref.at[jnp.int32(i)]) for i in (0, offsets_ref.shape[0] - 1))
        token = (number * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32))[None, :, None]
        return cls(tile, positions_ref, token, token < T, *clip_bounds(first, end, T * k))

    @classmethod
    def and_columns(cls, D: int, tile: Tiles, positions_ref, offsets_ref) -> tuple["Tokens", Columns]:
        """The tokens and columns of a program in a grid over tokens and chunks of columns, chunks fastest."""
        chunks = pl.cdiv(D, tile.block)
        columns = columns_of(pl.program_id(0) % chunks, D, tile.block)
        return cls.of_program(pl.program_id(0) // chunks, tile, positions_ref, offsets_ref), columns

    def each_batch(self, body, carry):
        """Folds body(choices, carry) over the tokens' choices, in order."""
        k = self.positions_ref.shape[1]
        size = min(self.tile.choices, power_of_2(k))
        if k <= size:
            return body(self._batch(0, size), carry)
        return lax.fori_loop(0, pl.cdiv(k, size), lambda i, carry: body(self._batch(i * size, size), carry), carry)

    def _batch(self, first, size: int) -> Choices:
        T, k = self.positions_ref.shape
        choice = first + jnp.arange(size, dtype=jnp.int32)[:, None, None]
        exists = jnp.broadcast_to(self.exists, (size, self.tile.rows, 1))
        if k % size:
            exists = exists & jnp.broadcast_to(choice < k, exists.shape)
        choices = Choices(self.number, choice, exists, exists, exists)
        position = load(self.positions_ref, choices.at, exists, 0)
        has_row = exists & (position >= self.lo) & (position < self.hi)
        return dataclasses.replace(choices, has_row=has_row, position=jnp.where(has_row, position, T * k))

    def clear(self, ref, choices: Choices, columns: Columns) -> None:
        """Writes zeros to the rows of ref [R, D] outside all groups: choice j of token t clears row t * k + j."""
        R = ref.shape[0]

        @pl.when((self.lo > 0) | (self.hi < R))
        def _():
            row = jnp.broadcast_to(choices.token * self.positions_ref.shape[1] + choices.choice, choices.exists.shape)
            outside = choices.exists & ((row < self.lo) | (row >= self.hi))
            store_rows(ref, jnp.where(outside, row, R), outside, columns, jnp.zeros((1, 1, 1), ref.dtype))


def _launch(kernel, tile: Tiles, routing: Routing, *operands: jax.Array, chunks: int, **options) -> Any:
    """`launch` of kernel(row_positions_ref, group_offsets_ref, operands' refs, results' refs) over all tokens, and for
    each over chunks of columns."""
    operands = (routing.row_positions, routing.group_offsets, *operands)
    grid = (pl.cdiv(routing.row_positions.shape[0], tile.rows) * chunks,)
    return launch(functools.partial(kernel, tile=tile), *operands, grid=grid, warps=tile.warps, **options)


def _permute_kernel(positions_ref, offsets_ref, x_ref, rows_ref, *, tile: Tiles, clear: bool):
    """Reads each token's row once and writes it to all its choices' rows. A program over rows would read a token from
    memory once per choice: the rows between its experts do not fit in the L2."""
    tokens, columns = Tokens.and_columns(x_ref.shape[1], tile, positions_ref, offsets_ref)
    x = load_rows(x_ref, tokens.number, tokens.exists, columns)

    def body(choices, carry):
        store_rows(rows_ref, choices.position, choices.has_row, columns, x)
        if clear:
            tokens.clear(rows_ref, choices, columns)
        return carry

    tokens.each_batch(body, 0)


@traced_once("tile", "clear", "interpret")
def permute_pallas(tile: Tiles, x: jax.Array, routing: Routing, *, clear: bool, interpret: bool) -> jax.Array:
    """[R, D] in x's dtype. No size is 0. clear: rows outside all groups are zeroed; otherwise not written."""
    chunks, out = pl.cdiv(x.shape[1], tile.block), out_struct((routing.row_positions.size, x.shape[1]), x.dtype, like=x)
    kernel = functools.partial(_permute_kernel, clear=clear)
    return _launch(kernel, tile, routing, x, chunks=chunks, out=out, interpret=interpret, name="permute", flops=0)


def _combine_kernel(positions_ref, offsets_ref, *refs, tile: Tiles):
    *weights_refs, rows_ref, out_ref = refs
    tokens, columns = Tokens.and_columns(rows_ref.shape[1], tile, positions_ref, offsets_ref)

    def body(choices, total):
        rows = load_rows(rows_ref, choices.position, choices.has_row, columns).astype(jnp.float32)
        for weights_ref in weights_refs:
            rows = rows * load(weights_ref, choices.at, choices.has_row, 0)
        return total + jnp.sum(rows, axis=0, keepdims=True)

    total = tokens.each_batch(body, jnp.zeros((1, tile.rows, tile.block), jnp.float32))
    store_rows(out_ref, tokens.number, tokens.exists, columns, total)


@traced_once("tile", "out_dtype", "interpret")
def combine_pallas(tile: Tiles, rows: jax.Array, routing: Routing, out_dtype, *, interpret: bool) -> jax.Array:
    """[T, D]; without weights they are ones. No size is 0."""
    # An element of a row is added, and before that multiplied if there are weights.
    operands = (rows,) if routing.weights is None else (routing.weights, rows)
    name, T, D = "permute_bwd" if len(operands) == 1 else "combine", routing.row_positions.shape[0], rows.shape[1]
    out, chunks, flops = out_struct((T, D), out_dtype, like=rows), pl.cdiv(D, tile.block), len(operands) * rows.size
    options: dict[str, Any] = {"chunks": chunks, "out": out, "flops": flops, "interpret": interpret, "name": name}
    return _launch(_combine_kernel, tile, routing, *operands, **options)


def _combine_bwd_kernel(
    positions_ref, offsets_ref, weights_ref, dout_ref, rows_ref, drows_ref, dweights_ref, *, tile: Tiles
):
    D = rows_ref.shape[1]
    tokens = Tokens.of_program(pl.program_id(0), tile, positions_ref, offsets_ref)
    lane = min(tile.block, 16 // rows_ref.dtype.itemsize)

    def of_choices(choices, carry):
        weights = load(weights_ref, choices.at, choices.has_row, 0)
        batch = choices.exists.shape[0]

        def of_chunk(chunk, dots):
            columns = columns_of(chunk, D, tile.block)
            rows = load_rows(rows_ref, choices.position, choices.has_row, columns).astype(jnp.float32)
            dout = load_rows(dout_ref, tokens.number, tokens.exists, columns).astype(jnp.float32)
            # A thread sums its own loads in one register per choice; the sum over threads follows the last chunk.
            dots = dots + jnp.sum((rows * dout).reshape(batch, tile.rows, tile.block // lane, lane), axis=3)
            store_rows(drows_ref, choices.position, choices.has_row, columns, weights * dout)
            tokens.clear(drows_ref, choices, columns)
            return dots

        dots, chunks = jnp.zeros((batch, tile.rows, tile.block // lane), jnp.float32), pl.cdiv(D, tile.block)
        dots = of_chunk(0, dots) if chunks == 1 else lax.fori_loop(0, chunks, of_chunk, dots)
        # Not 0 times a NaN of dout: a choice without a row has no gradient.
        dweights = jnp.where(choices.has_row, jnp.sum(dots, axis=2, keepdims=True), 0.0)
        store(dweights_ref, choices.at, dweights, choices.exists)
        return carry

    tokens.each_batch(of_choices, 0)


@traced_once("tile", "interpret")
def combine_bwd_pallas(
    tile: Tiles, rows: jax.Array, routing: Routing, dout: jax.Array, *, interpret: bool
) -> list[jax.Array]:
    """(drows [R, D] in rows' dtype, dweights [T, k]). No size is 0."""
    operands = routing.weights, dout, rows
    out = [out_struct(x.shape, x.dtype, like=rows) for x in (rows, routing.weights)]
    # An element of a row: 2 for the dot product that is its weight's gradient, 1 for its own gradient.
    options: dict[str, Any] = {"flops": 3 * rows.size, "interpret": interpret, "name": "combine_bwd"}
    return _launch(_combine_bwd_kernel, tile, routing, *operands, chunks=1, out=out, **options)
