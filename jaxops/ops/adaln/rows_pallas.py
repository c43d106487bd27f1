"""What the row kernels share: where a program's rows lie, how a row's columns are cut into registers, statistics, activations."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.activations import ACTIVATIONS
from jaxops._lib.ragged import runs
from jaxops.ops.adaln.plan import Spec, Tiles

_WIDTH = 128  # offsets that one step of the search for a row's sequence compares: one step finds it among 128, two among 16,384

Chunks = list[jax.Array]  # one [step or 1, block] array for each `block` columns


def tile_count(T: int, B: int, rows: int) -> int:
    """Tiles, and so programs: one for each multiple of `rows` among the rows, and one for the head of each run but the first."""
    return pl.cdiv(T, rows) + B + 1


def ceil_div(count: jax.Array, size: int) -> jax.Array:
    """Of a traced int32 count, not negative. `pl.cdiv` makes the divisor int64 under jax_enable_x64."""
    return lax.div(count + (size - 1), lax.full_like(count, size))


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows start to end, all of one sequence; -1 and B are the runs of rows outside. lo and hi are the whole sequence's first row and end.

    A sequence is its head, up to the first multiple of `rows`, and then a tile from each multiple on. So no tile must count the tiles before it: tile
    t < cdiv(T, rows) starts at row t * rows, in whatever sequence that is, and then come the heads, one for each sequence, most of them short or empty.
    """

    sequence: jax.Array
    start: jax.Array
    end: jax.Array
    lo: jax.Array
    hi: jax.Array


def find_tile(offsets_ref, t: jax.Array, T: int, rows: int) -> Tile:
    starts = pl.cdiv(T, rows)
    is_head = t >= starts
    run = lax.cond(is_head, lambda: t - starts + 1, lambda: _run_of(offsets_ref, t * rows))
    lo, hi = run_bounds(offsets_ref, run, T)
    first = ceil_div(lo, rows) * rows
    start = jnp.where(is_head, lo, t * rows)
    return Tile(run - 1, start, jnp.minimum(hi, jnp.where(is_head, first, start + rows)), lo, hi)


def run_bounds(offsets_ref, run: jax.Array, T: int) -> tuple[jax.Array, jax.Array]:
    return runs(lambda i: plgpu.load(offsets_ref.at[i]), run, offsets_ref.shape[0] - 1, T)


def _run_of(offsets_ref, row: jax.Array) -> jax.Array:
    """How many offsets are at most `row`: the number of its run, 0 before the first sequence. A search, _WIDTH offsets a step."""
    count = offsets_ref.shape[0]
    first, span = jnp.int32(0) * row, count
    while True:
        stride = pl.cdiv(span, _WIDTH)
        i = first + stride * jnp.arange(_WIDTH, dtype=jnp.int32)
        passed = (plgpu.load(offsets_ref.at[jnp.minimum(i, count - 1)]) <= row) & (i < count)
        found = jnp.sum(passed, dtype=jnp.int32)
        if stride == 1:
            return first + found
        first, span = first + stride * jnp.maximum(found - 1, 0), stride


@dataclasses.dataclass(frozen=True)
class Columns:
    """A row of D columns as arrays of `block` columns: Triton's arrays are powers of two, D need not be one."""

    D: int
    block: int

    def __iter__(self):
        """(columns [1, block], which of them there are, or None for all) of each array."""
        for first in range(0, self.D, self.block):
            columns = first + jnp.arange(self.block, dtype=jnp.int32)[None, :]
            yield columns, None if first + self.block <= self.D else columns < self.D

    def load(self, ref, rows: jax.Array, rows_in: jax.Array | None = None) -> Chunks:
        """ref[rows] in ref's dtype, zero where rows_in is false and past D. rows, rows_in: [step, 1]."""
        found = []
        for columns, columns_in in self:
            shape = (rows.shape[0], self.block)
            masks = [jnp.broadcast_to(mask, shape) for mask in (rows_in, columns_in) if mask is not None]
            mask = None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
            found.append(plgpu.load(ref.at[rows, columns], mask=mask, other=None if mask is None else 0.0))
        return found

    def load_vector(self, ref) -> Chunks:
        """ref [D] as [1, block] arrays."""
        return [
            plgpu.load(ref.at[columns], mask=columns_in, other=None if columns_in is None else 0.0)
            for columns, columns_in in self
        ]

    def store(self, ref, rows: jax.Array, rows_in: jax.Array, values: Chunks) -> None:
        self._store(lambda columns: ref.at[rows, columns], ref.dtype, rows_in, values)

    def store_transposed(self, ref, rows: jax.Array, rows_in: jax.Array, values: Chunks) -> None:
        """Into ref [D, T]."""
        self._store(lambda columns: ref.at[columns, rows], ref.dtype, rows_in, values)

    def _store(self, at, dtype, rows_in: jax.Array, values: Chunks) -> None:
        for (columns, columns_in), value in zip(self, values, strict=True):
            shape = (rows_in.shape[0], self.block)
            mask = jnp.broadcast_to(rows_in, shape)
            mask = mask if columns_in is None else mask & jnp.broadcast_to(columns_in, shape)
            plgpu.store(at(columns), jnp.broadcast_to(value, shape).astype(dtype), mask=mask)

    def mean(self, values: Chunks) -> jax.Array:
        """[step, 1]. What lies past D must be zero."""
        return jnp.sum(sum(values[1:], values[0]), axis=1, keepdims=True) * (1 / self.D)

    def inside(self, values: Chunks) -> Chunks:
        """Zeros past D again, after an operation that does not keep them."""
        return [
            value if columns_in is None else jnp.where(columns_in, value, 0.0)
            for (_, columns_in), value in zip(self, values, strict=True)
        ]

    def normalise(
        self, x: Chunks, spec: Spec, stats: dict[str, jax.Array] | None = None, rows_in: jax.Array | None = None
    ) -> tuple[Chunks, dict[str, jax.Array]]:
        """x without its mean (layer) and over its standard deviation (or RMS), and those statistics, each [step, 1], unless they are given.

        The mean goes first, so that a large one cancels nothing of the variance. Rows that rows_in leaves out are zeros, and stay so with epsilon 0, too.
        """
        stats = dict(stats or {})
        if spec.norm == "layer":
            if "mean" not in stats:
                stats["mean"] = self.mean(x)
            x = self.inside([value - stats["mean"] for value in x])
        if "rstd" not in stats:
            square = self.mean([value * value for value in x])
            stats["rstd"] = lax.rsqrt((square if rows_in is None else jnp.where(rows_in, square, 1.0)) + spec.epsilon)
        return [value * stats["rstd"] for value in x], stats


def widen(values: Chunks) -> Chunks:
    return [value.astype(jnp.float32) for value in values]


def affine(n: Chunks, weight: Chunks | None, bias: Chunks | None) -> Chunks:
    n = n if weight is None else [a * w for a, w in zip(n, weight, strict=True)]
    return n if bias is None else [a + b for a, b in zip(n, bias, strict=True)]


def activate(u: jax.Array, activation: str | None) -> tuple[jax.Array, jax.Array | None]:
    """The activation and its slope at u; None is a slope of one."""
    return (u, None) if activation is None else ACTIVATIONS[activation](u)


def steps_of(tile: Tile, tiles: Tiles, load, body, carry):
    """Folds body(rows [step, 1], which of them there are, load(those two), carry) over a tile's rows."""

    def rows_of(i):
        rows = (tile.start + i * tiles.step + jnp.arange(tiles.step, dtype=jnp.int32))[:, None]
        return rows, rows < tile.end

    def one(i, carry):
        return body(*rows_of(i), load(*rows_of(i)), carry)

    def one_ahead(i, loaded_and_carry):
        loaded, carry = loaded_and_carry
        following = load(*rows_of(i + 1))  # on its way while this step is worked on; past the end it reads nothing
        return following, body(*rows_of(i), loaded, carry)

    if tiles.step == tiles.rows:
        return one(0, carry)
    steps = ceil_div(tile.end - tile.start, tiles.step)
    if tiles.ahead:
        return lax.fori_loop(0, steps, one_ahead, (load(*rows_of(0)), carry))[1]
    return lax.fori_loop(0, steps, one, carry)
