"""What the kernels share: a program's tokens and columns, and a batch of those tokens' choices. Register arrays have the axes choice, token, column: Triton
lays warps along the last axes first, so that a sum over choices stays in each thread."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.powers import power_of_2
from jaxops._lib.ragged import clip_bounds
from jaxops.ops.permute.plan import Tiles


@dataclasses.dataclass(frozen=True)
class Columns:
    """Of a register array: their numbers [1, 1, block], and which of them there are, None for all. Triton's arrays are powers of two, D need not be one."""

    number: jax.Array
    there: jax.Array | None

    @classmethod
    def of_chunk(cls, chunk, D: int, block: int) -> "Columns":
        number = chunk * block + jnp.arange(block, dtype=jnp.int32)[None, None, :]
        return cls(number, None if D % block == 0 else number < D)

    def _mask(self, mask: jax.Array) -> jax.Array:
        shape = (*mask.shape[:2], self.number.shape[2])
        mask = jnp.broadcast_to(mask, shape)
        return mask if self.there is None else mask & jnp.broadcast_to(self.there, shape)

    def load(self, ref, row: jax.Array, row_in: jax.Array) -> jax.Array:
        """ref[row] in ref's dtype, zero where row_in is false. row, row_in: [choices or 1, rows, 1]."""
        return plgpu.load(ref.at[row, self.number], mask=self._mask(row_in), other=0.0)

    def store(self, ref, row: jax.Array, row_in: jax.Array, values: jax.Array) -> None:
        mask = self._mask(row_in)
        plgpu.store(ref.at[row, self.number], jnp.broadcast_to(values, mask.shape).astype(ref.dtype), mask=mask)


def each_chunk(D: int, block: int, body, carry):
    """Folds body(columns, carry) over a row."""
    if block >= D:
        return body(Columns.of_chunk(0, D, block), carry)
    return lax.fori_loop(
        0, pl.cdiv(D, block), lambda chunk, carry: body(Columns.of_chunk(chunk, D, block), carry), carry
    )


@dataclasses.dataclass(frozen=True)
class Choices:
    """A batch of choices of a program's tokens.

    Attributes:
      token, choice: [1, rows, 1] and [batch, 1, 1], their numbers.
      there: [batch, rows, 1], which of them there are.
      has_row: which of those have a row in a group.
      position: that row, R for the others. What no mask lets through goes one past the end: a GPU never sees it, but Pallas' interpreter stores what was
        there before.
    """

    token: jax.Array
    choice: jax.Array
    there: jax.Array
    has_row: jax.Array
    position: jax.Array

    def load(self, ref, has_value: jax.Array) -> jax.Array:
        """ref [T, k] of these choices, zero where has_value is false."""
        token, choice = (jnp.broadcast_to(index, self.there.shape) for index in (self.token, self.choice))
        return plgpu.load(ref.at[token, choice], mask=has_value, other=0)

    def store(self, ref, values: jax.Array) -> None:
        """Into ref [T, k]."""
        token, choice = (jnp.broadcast_to(index, self.there.shape) for index in (self.token, self.choice))
        plgpu.store(ref.at[token, choice], values, mask=self.there)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A program's tokens, [1, rows, 1]; which of them there are; lo and hi, the first row of all groups and the end of the last one's."""

    tile: Tiles
    positions_ref: Any
    number: jax.Array
    there: jax.Array
    lo: jax.Array
    hi: jax.Array

    @classmethod
    def of_program(cls, number, tile: Tiles, positions_ref, offsets_ref) -> "Tokens":
        T, k = positions_ref.shape
        first, end = (plgpu.load(offsets_ref.at[jnp.int32(i)]) for i in (0, offsets_ref.shape[0] - 1))
        token = (number * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32))[None, :, None]
        return cls(tile, positions_ref, token, token < T, *clip_bounds(first, end, T * k))

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
        there = jnp.broadcast_to(self.there, (size, self.tile.rows, 1))
        if k % size:
            there = there & jnp.broadcast_to(choice < k, there.shape)
        choices = Choices(self.number, choice, there, there, there)
        position = choices.load(self.positions_ref, there)
        has_row = there & (position >= self.lo) & (position < self.hi)
        return dataclasses.replace(choices, has_row=has_row, position=jnp.where(has_row, position, T * k))

    def clear(self, ref, choices: Choices, columns: Columns) -> None:
        """Zeros in the rows of ref [R, D] that lie in no group: choice j of token t sees to row t * k + j, so that every row has one that does."""
        R = ref.shape[0]

        @pl.when((self.lo > 0) | (self.hi < R))
        def _():
            row = jnp.broadcast_to(choices.token * self.positions_ref.shape[1] + choices.choice, choices.there.shape)
            outside = choices.there & ((row < self.lo) | (row >= self.hi))
            columns.store(ref, jnp.where(outside, row, R), outside, jnp.zeros((1, 1, 1), ref.dtype))
