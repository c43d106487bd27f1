"""For Pallas kernels over rows in runs (sequences, groups) that share vectors: which rows of one run a program has, a
row's columns in registers, and the loop over the rows. `ops/adaln` is the example."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.pallas.masked_pallas import both, load, store
from jaxops._lib.ragged.offsets import runs

_WIDTH = 128  # offsets that one step of the search for a row's sequence compares: 1 step for up to 128, 2 up to 16,384

Chunks = list[jax.Array]  # one [step or 1, block] array for each `block` columns


def ceil_div(count: jax.Array, size: int) -> jax.Array:
    """count / size, rounded up; count >= 0 is traced int32. `pl.cdiv` makes the divisor int64 under jax_enable_x64."""
    return lax.div(count + (size - 1), lax.full_like(count, size))


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows start to end of one sequence (-1 and B: of the rows before and after all), whose rows are lo to hi."""

    sequence: jax.Array
    start: jax.Array
    end: jax.Array
    lo: jax.Array
    hi: jax.Array
    inside: jax.Array  # whether the sequence is one of the B
    clipped: jax.Array  # [1, 1]: the sequence, clipped to 0 to B - 1


def fold_tiles(
    offsets_ref, program: jax.Array, T: int, rows: int, body: Callable[[Tile, Any], Any], carry: Any = ()
) -> None:
    """Folds body(tile, carry) over the tiles of rows program * rows to (program + 1) * rows: one for each sequence with
    rows there.

    Equal numbers of rows, so equal work, whatever the lengths: a program searches its first sequence only, and takes
    the next ones as they follow. Empty sequences have no tile.
    """
    B, last = offsets_ref.shape[0] - 1, jnp.minimum((program + 1) * rows, T)

    def one(state):
        run, start, carry = state
        lo, hi = run_bounds(offsets_ref, run, T)
        # Offsets that break the contract must not make the loop endless.
        end = jnp.where(hi > start, jnp.minimum(hi, last), last)
        sequence = run - 1
        inside = (sequence >= 0) & (sequence < B)
        following = jnp.minimum(run + 1, B + 1)
        found = (end >= last) | (run_bounds(offsets_ref, following, T)[1] > end)
        tile = Tile(sequence, start, end, lo, hi, inside, jnp.broadcast_to(jnp.clip(sequence, 0, B - 1), (1, 1)))
        carry = body(tile, carry)
        return lax.cond(found, lambda: following, lambda: run_of(offsets_ref, end)), end, carry

    first = program * rows
    lax.while_loop(lambda state: state[1] < last, one, (run_of(offsets_ref, first), first, carry))


def run_bounds(offsets_ref, run: jax.Array, T: int) -> tuple[jax.Array, jax.Array]:
    return runs(lambda i: plgpu.load(offsets_ref.at[i]), run, offsets_ref.shape[0] - 1, T)


def run_of(offsets_ref, row: jax.Array) -> jax.Array:
    """The run of a row: the number of offsets <= row. A search that compares _WIDTH offsets a step."""
    count = offsets_ref.shape[0]
    first, span = jnp.int32(0) * row, count
    while True:
        stride = pl.cdiv(span, _WIDTH)
        i = first + stride * jnp.arange(_WIDTH, dtype=jnp.int32)
        passed = (plgpu.load(offsets_ref.at[jnp.minimum(i, count - 1)]) <= row) & (i < count)
        count_passed = jnp.sum(passed, dtype=jnp.int32)
        if stride == 1:
            return first + count_passed
        first, span = first + stride * jnp.maximum(count_passed - 1, 0), stride


@dataclasses.dataclass(frozen=True)
class Columns:
    """A row of D columns as arrays of `block` columns: Triton's arrays are powers of two, D need not be one."""

    D: int
    block: int

    def __iter__(self):
        """(columns [1, block], their mask or None for all) of each array."""
        for first in range(0, self.D, self.block):
            columns = first + jnp.arange(self.block, dtype=jnp.int32)[None, :]
            yield columns, None if first + self.block <= self.D else columns < self.D

    def load(self, ref, rows: jax.Array, rows_in: jax.Array | None = None) -> Chunks:
        """ref[rows] in ref's dtype, zero where rows_in is false and past D. rows, rows_in: [step, 1]."""
        return [load(ref, (rows, columns), both(rows_in, columns_in)) for columns, columns_in in self]

    def load_vector(self, ref) -> Chunks:
        """ref [D] as [1, block] arrays."""
        return [load(ref, (columns,), columns_in) for columns, columns_in in self]

    def store(
        self, ref, rows: jax.Array, rows_in: jax.Array | None, values: Sequence[jax.Array], transposed: bool = False
    ) -> None:
        """Stores into ref [T, D], or ref [D, T] if transposed."""
        for (columns, columns_in), value in zip(self, values, strict=True):
            store(ref, (columns, rows) if transposed else (rows, columns), value, both(rows_in, columns_in))

    def mean(self, values: Chunks) -> jax.Array:
        """[step, 1]. Columns past D must be zero."""
        return jnp.sum(sum(values[1:], values[0]), axis=1, keepdims=True) * (1 / self.D)


def widen(values: Chunks) -> Chunks:
    return [value.astype(jnp.float32) for value in values]


def step_rows(start: jax.Array, step: int, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[step, 1]: numbers of the rows from start on, and which of them are before end."""
    number = (start + jnp.arange(step, dtype=jnp.int32))[:, None]
    return number, number < end


def fold_steps(tile: Tile, step: int, load: Callable, body: Callable, carry: Any, loaded: Any = None) -> Any:
    """Folds body(numbers [step, 1], their mask, load(numbers, mask), carry) over a tile's rows.

    loaded: load of the first step. Then each step is loaded during the one before it, and the result is (load of the
    step from tile.end on, carry): `load` may have rows of the next tile, as its mask here is false.
    """
    steps = ceil_div(tile.end - tile.start, step)

    def one(i, carry):
        rows = step_rows(tile.start + i * step, step, tile.end)
        return body(*rows, load(*rows), carry)

    def one_ahead(i, loaded_and_carry):
        loaded, carry = loaded_and_carry
        at = tile.start + i * step
        following = load(*step_rows(jnp.minimum(at + step, tile.end), step, tile.end))  # in flight during this step
        return following, body(*step_rows(at, step, tile.end), loaded, carry)

    if loaded is None:
        return lax.fori_loop(0, steps, one, carry)
    return lax.fori_loop(0, steps, one_ahead, (loaded, carry))
