"""Shared by permute's kernels: a program's tokens and columns, and batches of the tokens' choices.

Register arrays have the axes choice, token, column. Triton lays warps along the last axes first, so a sum over choices
stays in each thread.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.launch_pallas import launch
from jaxops._lib.powers import power_of_2
from jaxops._lib.ragged import clip_bounds
from jaxops.ops.permute.plan import Tiles
from jaxops.ops.route import Routing


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of a register array: their numbers [1, 1, block], and which of them are less than D (None for all).
    Triton's sizes are powers of two; D need not be one."""

    number: jax.Array
    inside: jax.Array | None

    @classmethod
    def of_chunk(cls, chunk, D: int, block: int) -> "Columns":
        number = chunk * block + jnp.arange(block, dtype=jnp.int32)[None, None, :]
        return cls(number, None if D % block == 0 else number < D)

    def _mask(self, mask: jax.Array) -> jax.Array:
        shape = (*mask.shape[:2], self.number.shape[2])
        mask = jnp.broadcast_to(mask, shape)
        return mask if self.inside is None else mask & jnp.broadcast_to(self.inside, shape)

    def load(self, ref, row: jax.Array, row_in: jax.Array) -> jax.Array:
        """ref[row] in ref's dtype, zero where row_in is false. row, row_in: [choices or 1, rows, 1]."""
        return plgpu.load(ref.at[row, self.number], mask=self._mask(row_in), other=0.0)

    def store(self, ref, row: jax.Array, row_in: jax.Array, values: jax.Array) -> None:
        mask = self._mask(row_in)
        plgpu.store(ref.at[row, self.number], jnp.broadcast_to(values, mask.shape).astype(ref.dtype), mask=mask)


def each_chunk(D: int, block: int, body, carry):
    """Folds body(columns, carry) over a row."""

    def step(chunk, carry):
        return body(Columns.of_chunk(chunk, D, block), carry)

    return step(0, carry) if block >= D else lax.fori_loop(0, pl.cdiv(D, block), step, carry)


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

    def _at(self, ref):
        return ref.at[tuple(jnp.broadcast_to(index, self.exists.shape) for index in (self.token, self.choice))]

    def load(self, ref, mask: jax.Array) -> jax.Array:
        """ref [T, k] of these choices, zero where mask is false."""
        return plgpu.load(self._at(ref), mask=mask, other=0)

    def store(self, ref, values: jax.Array) -> None:
        """Into ref [T, k]."""
        plgpu.store(self._at(ref), values, mask=self.exists)


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
        """Of a program in a grid over tokens and chunks of columns, chunks fastest."""
        chunks = pl.cdiv(D, tile.block)
        columns = Columns.of_chunk(pl.program_id(0) % chunks, D, tile.block)
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
        position = choices.load(self.positions_ref, exists)
        has_row = exists & (position >= self.lo) & (position < self.hi)
        return dataclasses.replace(choices, has_row=has_row, position=jnp.where(has_row, position, T * k))

    def clear(self, ref, choices: Choices, columns: Columns) -> None:
        """Writes zeros to the rows of ref [R, D] outside all groups: choice j of token t clears row t * k + j."""
        R = ref.shape[0]

        @pl.when((self.lo > 0) | (self.hi < R))
        def _():
            row = jnp.broadcast_to(choices.token * self.positions_ref.shape[1] + choices.choice, choices.exists.shape)
            outside = choices.exists & ((row < self.lo) | (row >= self.hi))
            columns.store(ref, jnp.where(outside, row, R), outside, jnp.zeros((1, 1, 1), ref.dtype))


def launch_rows(
    kernel, tile: Tiles, routing: Routing, *operands: jax.Array, out, D: int | None, interpret: bool, name: str
):
    """`launch` of kernel(row_positions_ref, group_offsets_ref, operands' refs, results' refs), over all tokens and,
    with D, chunks of D columns."""
    programs = pl.cdiv(routing.row_positions.shape[0], tile.rows) * (1 if D is None else pl.cdiv(D, tile.block))
    given = (routing.row_positions, routing.group_offsets, *operands)
    return launch(kernel, *given, out=out, grid=(programs,), warps=tile.warps, interpret=interpret, name=name)
