"""A tile of a cast's tensor as a kernel sees it: which thread holds which element, and where the tile lies."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.fp8 import BLOCK, magnitudes
from jaxops._lib.tiling import panel_order
from jaxops._lib.work_list import COLUMNS as SCHEDULED
from jaxops.ops.quantize.plan import Tiles

RANK = 7  # axes of a tile's array, see `Grid`
# Of rows, and of columns in the order in which a reduction is cheapest.
ROWS, BLOCKS, COLUMNS = (0, 1, 2, 6), 3, (5, 4)
Mask = jax.Array | None  # None always holds


@dataclasses.dataclass(frozen=True)
class Grid:
    """A tile as a seven-dimensional array: (held, strips, far, blocks, chunks, vector, near).

    An element's row is ((far * tiles.near + near) * tiles.patch) + strips * held + held; its column is one of `vector`
    neighbours, 16 bytes, of a chunk of a block. Triton assigns the vector axis to registers, then near, chunks, far and
    strips to threads and warps, and held to registers. So each thread loads 16 bytes of each of several consecutive
    rows. For a transposed store Triton moves FP8 numbers through shared memory, so that each thread writes 16 bytes of
    a patch of `patch` rows, and the threads along near write the bytes after the patch.
    """

    tiles: Tiles
    vector: int
    width: int  # of a block

    @classmethod
    def of(cls, tiles: Tiles, itemsize: int, by_blocks: bool) -> "Grid":
        width = min(BLOCK, tiles.cols) if by_blocks else tiles.cols
        return cls(tiles, min(16 // itemsize, width), width)

    @property
    def shape(self) -> tuple[int, ...]:
        t, chunks = self.tiles, self.width // self.vector
        far = t.rows // (t.patch * t.near)
        return self.held, t.patch // self.held, far, t.cols // self.width, chunks, self.vector, t.near

    @property
    def held(self) -> int:
        """Consecutive rows that a thread holds: all of its rows, if a patch has so many."""
        rows = self.tiles.rows * self.tiles.cols // (self.vector * 32 * self.tiles.warps)
        return max(1, min(self.tiles.patch, rows))

    def _along(self, axis: int, size: int | None = None) -> jax.Array:
        size = size or self.shape[axis]
        shape = [size if i == axis else 1 for i in range(RANK)]
        return lax.broadcast_in_dim(jnp.arange(size, dtype=jnp.int32), shape, (axis,))

    @property
    def _patches(self) -> jax.Array:
        """The first row of each patch."""
        return (self._along(2) * self.tiles.near + self._along(6)) * self.tiles.patch

    @property
    def rows(self) -> jax.Array:
        return self._patches + self._along(1) * self.held + self._along(0)

    @property
    def rows_t(self) -> jax.Array:
        """The rows of what `transposed` returns."""
        return self._patches + self._along(1, self.tiles.patch)

    @property
    def blocks(self) -> jax.Array:
        return self._along(BLOCKS)

    @property
    def columns(self) -> jax.Array:
        return self._along(BLOCKS) * self.width + self._along(4) * self.vector + self._along(5)

    def transposed(self, x: jax.Array) -> jax.Array:
        """A tile to be cast for a transposed store: [1, patch, far, ...], elements and their threads as they are.

        The held rows of a column are neighbours in the order in which Triton counts a thread's registers, so that an
        instruction casts two of them, and shared memory gets the bytes of up to 16 of them at once. Without this order
        each byte is taken out of a pair of columns: the cast to both layouts then had 18.2 instructions an element
        instead of 15.3 (1x128, NVIDIA's SASS).
        """
        if self.held == 1:
            return x
        x = _last(lax.split(x, (1,) * self.held))
        x = jnp.transpose(x, (0, 1, *range(RANK, x.ndim), *range(2, RANK)))
        return x.reshape(1, self.tiles.patch, *self.shape[2:])


def _last(parts: Sequence[jax.Array]) -> jax.Array:
    """Arrays whose number is a power of two, stacked along new last axes of 2, the last of which counts fastest."""
    if len(parts) == 1:
        return parts[0]
    return jnp.stack([_last(parts[::2]), _last(parts[1::2])], axis=-1)


def abs_for_max(x: jax.Array, interpret: bool) -> jax.Array:
    """|x| of the result of `infinity_to_nan`, for a maximum, which ignores NaN on a GPU unless all are NaN."""
    return magnitudes(x) if interpret else jnp.abs(x)


def amax_over(sizes: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    for axis in axes:
        if sizes.shape[axis] > 1:
            sizes = jnp.max(sizes, axis=axis, keepdims=True)
    return sizes


def index(value: int | jax.Array) -> jax.Array:
    """A scalar as an index array."""
    return jnp.full((1,) * RANK, value, jnp.int32)


def inside(offsets_ref, rows: jax.Array) -> jax.Array:
    """Which rows are in a group."""
    at = (jnp.full((1,) * rows.ndim, i, jnp.int32) for i in (0, offsets_ref.shape[0] - 1))
    first, end = (plgpu.load(offsets_ref.at[i]) for i in at)
    return (rows >= first) & (rows < end)


@dataclasses.dataclass(frozen=True)
class Location:
    """A program's tile in tensor g: index arrays, and their masks."""

    g: jax.Array
    is_first: jax.Array  # the tile is the tensor's first
    rows: jax.Array  # of x and the row layout
    rows_in: Mask
    rows_t: jax.Array  # the same rows as columns of values_t, in the order of `Grid.transposed`
    rows_t_in: Mask
    block: jax.Array  # number of the 128 columns of values_t
    columns: jax.Array  # of x
    columns_in: Mask
    blocks: jax.Array  # numbers of the 128 columns of x
    blocks_in: Mask
    j: jax.Array  # scalar, the tile's number among those of its rows


def locate(ref: dict, pid: jax.Array, grid: Grid, size: tuple[int, int, int], down: int) -> Location:
    (_, M, K), tiles = size, grid.tiles
    across = pl.cdiv(K, tiles.cols)
    g, tile = pid // (down * across), pid % (down * across)
    i, j = panel_order(tile, down, across, tiles.panel)
    rows, rows_t, block = i * tiles.rows + grid.rows, i * tiles.rows + grid.rows_t, index(i)
    rows_in, rows_t_in = (None, None) if M % tiles.rows == 0 else (rows < M, rows_t < M)
    if "tiles" in ref:
        column = ref["tiles"].shape[0] // SCHEDULED
        start, end, block = (plgpu.load(ref["tiles"].at[index(n * column) + i]) for n in (1, 2, 3))
        rows = start + grid.rows
        rows_in = rows < end
        # A tile outside the groups has no columns. A group's last tile writes all of its own: zeros past the end.
        rows_t_in = (block >= 0) & (block < ref["values_t"].shape[1] // BLOCK)
        rows_t = jnp.maximum(block, 0) * BLOCK + grid.rows_t
    columns, blocks = j * tiles.cols + grid.columns, j * (tiles.cols // grid.width) + grid.blocks
    cut = K % tiles.cols != 0
    columns_in, blocks_in = (columns < K, blocks < pl.cdiv(K, BLOCK)) if cut else (None, None)
    is_first = index(tile) == 0
    return Location(g, is_first, rows, rows_in, rows_t, rows_t_in, block, columns, columns_in, blocks, blocks_in, j)
