"""A tile of a cast's tensors as a kernel sees it: which thread holds which element, where the tile lies, how it is read
from its sources."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.numerics.fp8 import BLOCK, magnitudes
from jaxops._lib.numerics.instructions import widened
from jaxops._lib.pallas.masked_pallas import both, load
from jaxops._lib.ragged.tiling import panel_order
from jaxops._lib.ragged.work_list import COLUMNS as SCHEDULED
from jaxops.ops.quantize.outputs import Beside, Computation, Gathered, Halves, Operands
from jaxops.ops.quantize.plan import Tiles

# Names of axes, see `Grid`: of rows, and of columns in the order in which a reduction is cheapest.
ROWS, COLUMNS, BLOCKS = ("held", "near", "far", "strips"), ("vector", "chunks"), ("blocks",)
Mask = jax.Array | None  # None always holds


@dataclasses.dataclass(frozen=True)
class Grid:
    """A tile as an array with the axes held, strips, far, blocks, chunks, vector, near, without those of size 1.

    An element's row is (far * tiles.near + near) * tiles.patch + strip * held + its number among those held; its column
    is one of `vector` neighbours, 16 bytes, of a chunk of a block. Triton assigns the vector axis to registers, then
    near, chunks, far and strips to threads and warps, and held to registers. So each thread loads 16 bytes of each of
    several consecutive rows. For a transposed store Triton moves FP8 numbers through shared memory, so that each thread
    writes 16 bytes of a patch of `patch` rows, and the threads along near write the bytes after the patch.

    (XLA rewrites the whole kernel without axes of size 1 if a reshape has some, and then moves tiles more often.)
    """

    tiles: Tiles
    vector: int
    width: int  # of a block
    holds: bool = True  # False: no thread is said to hold consecutive rows, see `transposed`

    @classmethod
    def of(cls, tiles: Tiles, itemsize: int, by_blocks: bool) -> "Grid":
        width = min(BLOCK, tiles.cols) if by_blocks else tiles.cols
        return cls(tiles, min(16 // itemsize, width), width)

    @property
    def _sizes(self) -> dict[str, int]:
        t = self.tiles
        rows = {"held": self.held, "strips": t.patch // self.held, "far": t.rows // (t.patch * t.near)}
        columns = {"blocks": t.cols // self.width, "chunks": self.width // self.vector, "vector": self.vector}
        return {name: n for name, n in (rows | columns | {"near": t.near}).items() if n > 1 or name == "vector"}

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self._sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._sizes.values())

    @property
    def held(self) -> int:
        """Consecutive rows that a thread holds: all of its rows, if a patch has so many."""
        rows = self.tiles.rows * self.tiles.cols // (self.vector * 32 * self.tiles.warps)
        return max(1, min(self.tiles.patch, rows)) if self.holds else 1

    def index(self, value: int | jax.Array) -> jax.Array:
        """A scalar as an index array."""
        return jnp.full((1,) * len(self.axes), value, jnp.int32)

    def _along(self, name: str) -> jax.Array:
        """Numbers along an axis."""
        if name not in self.axes:
            return self.index(0)
        size = self._sizes[name]
        shape = [size if axis == name else 1 for axis in self.axes]
        return lax.broadcast_in_dim(jnp.arange(size, dtype=jnp.int32), shape, (self.axes.index(name),))

    @property
    def _patches(self) -> jax.Array:
        """The first row of each patch."""
        return (self._along("far") * self.tiles.near + self._along("near")) * self.tiles.patch

    @property
    def rows(self) -> jax.Array:
        # In the order of `transposed`: each pair of neighbours are half of the held rows apart.
        n, half = self._along("held"), self.held // 2
        return self._patches + self._along("strips") * self.held + n % 2 * half + n // 2

    @property
    def blocks(self) -> jax.Array:
        return self._along("blocks")

    @property
    def columns(self) -> jax.Array:
        return self.blocks * self.width + self._along("chunks") * self.vector + self._along("vector")

    def largest(self, x: jax.Array, *names: str) -> jax.Array:
        """The maximum over some axes, which then have size 1."""
        return self._over(jnp.max, x, names)

    def summed(self, x: jax.Array, *names: str) -> jax.Array:
        return self._over(jnp.sum, x, names)

    def _over(self, reduce: Callable, x: jax.Array, names: tuple[str, ...]) -> jax.Array:
        for axis in (self.axes.index(name) for name in names if name in self.axes):
            if x.shape[axis] > 1:
                x = reduce(x, axis=axis, keepdims=True)
        return x

    @property
    def t(self) -> "Grid":
        """Of what `transposed` returns: the held rows are rows of their strip."""
        return dataclasses.replace(self, holds=False)

    def transposed(self, x: jax.Array) -> jax.Array:
        """A tile to be cast for a transposed store. Elements stay in their threads.

        The held rows of a column become neighbours in the order in which Triton counts a thread's registers, so that an
        instruction casts two of them, and shared memory gets the bytes of up to 16 of them at once. Without this order
        each byte is taken out of a pair of columns.
        """
        if self.held == 1:
            return x
        # No part has an axis of size 1.
        x = _last(lax.split(x, (2,) * (self.held // 2)))
        rows, new = 1 + ("strips" in self.axes), len(self.axes)
        return jnp.transpose(x, (*range(rows)[::-1], *range(new, x.ndim), *range(rows, new))).reshape(self.t.shape)


def _last(parts: Sequence[jax.Array]) -> jax.Array:
    """Arrays whose number is a power of two, stacked along new last axes of 2, the last of which counts fastest."""
    if len(parts) == 1:
        return parts[0]
    return jnp.stack([_last(parts[::2]), _last(parts[1::2])], axis=-1)


def abs_for_max(x: jax.Array, interpret: bool) -> jax.Array:
    """|x| of the result of `infinity_to_nan`, for a maximum, which ignores NaN on a GPU unless all are NaN."""
    return magnitudes(x) if interpret else jnp.abs(x)


def inside(offsets_ref, rows: jax.Array) -> jax.Array:
    """Which rows are in a group."""
    at = (jnp.full((1,) * rows.ndim, i, jnp.int32) for i in (0, offsets_ref.shape[0] - 1))
    first, end = (plgpu.load(offsets_ref.at[i]) for i in at)
    return (rows >= first) & (rows < end)


@dataclasses.dataclass(frozen=True)
class Location:
    """A program's tile in tensor g: index arrays, and their masks."""

    g: jax.Array | int
    is_first: jax.Array  # the tile is the tensor's first
    rows: jax.Array  # of x and the row layout
    rows_in: Mask
    block: jax.Array  # number of the 128 columns of values_t
    block_in: Mask
    columns: jax.Array  # of x
    columns_in: Mask
    blocks: jax.Array  # numbers of the 128 columns of x
    blocks_in: Mask
    rows_t: jax.Array  # columns of values_t, of what `Grid.transposed` returns
    columns_t: jax.Array  # rows of values_t
    t_in: Mask  # both are
    j: jax.Array  # scalar, the tile's number among those of its rows


def locate(schedule_ref, pid: jax.Array, grid: Grid, size: tuple[int, int, int], down: int, blocks_t: int) -> Location:
    """Where program pid's tile is, of `down` tiles one below the other.

    Args:
      schedule_ref: the work list of ragged groups' column layout, which has blocks_t blocks of 128 columns; or None.
    """
    (_, M, K), tiles = size, grid.tiles
    across = pl.cdiv(K, tiles.cols)
    g, tile = pid // (down * across), pid % (down * across)
    i, j = panel_order(tile, down, across, tiles.panel)
    rows, block, t = i * tiles.rows + grid.rows, grid.index(i), grid.t
    rows_t = i * tiles.rows + t.rows
    rows_in, rows_t_in, block_in = (None, None, None) if M % tiles.rows == 0 else (rows < M, rows_t < M, None)
    if schedule_ref is not None:
        column = schedule_ref.shape[0] // SCHEDULED
        start, end, number = (plgpu.load(schedule_ref.at[n * column + i]) for n in (1, 2, 3))
        rows, block = start + grid.rows, grid.index(number)
        rows_in = rows < end
        # A tile outside the groups has no columns. A group's last tile writes all of its own: zeros past the end.
        block_in, rows_t_in = ((b >= 0) & (b < blocks_t) for b in (block, t.index(number)))
        rows_t = jnp.maximum(number, 0) * BLOCK + t.rows
    columns, blocks = j * tiles.cols + grid.columns, j * (tiles.cols // grid.width) + grid.blocks
    columns_t = j * tiles.cols + t.columns
    cut = K % tiles.cols != 0
    columns_in, blocks_in = (columns < K, blocks < pl.cdiv(K, BLOCK)) if cut else (None, None)
    t_in = both(rows_t_in, columns_t < K if cut else None)
    is_first = grid.index(tile) == 0
    return Location(
        g, is_first, rows, rows_in, block, block_in, columns, columns_in, blocks, blocks_in, rows_t, columns_t, t_in, j
    )


def refs_of(operands: Operands) -> dict[str, jax.Array]:
    """The arrays of `read`'s operands by their names in a kernel, stacks as one matrix."""
    arrays = {}
    for n, operand in enumerate(operands):
        is_source = isinstance(operand, (Halves, Gathered, Beside))
        parts = operand._asdict() if is_source else {"x": operand}
        arrays |= {f"{name}{n}": a.reshape(-1, a.shape[2]) if a.ndim == 3 else a for name, a in parts.items()}
    return arrays


def read(
    ref: dict, computation: Computation, grid: Grid, at: tuple[jax.Array, jax.Array], rows_in: Mask, columns_in: Mask,
    j: jax.Array,
) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:  # fmt: skip
    """A tile of each tensor that is cast, in the dtype in which it would be stored, and those to be added up, in
    float32. All are zeros where a mask does not hold: operands are, and `compute` of zeros is zero.

    Args:
      at: rows (of a stack, as one matrix) and columns.
      j: scalar, the tile's number among those of its rows.
    """
    (rows, columns), inside, loaded = at, both(rows_in, columns_in), []
    for n, kind in enumerate(computation.kinds):
        x = ref[f"x{n}"]
        if kind == "vector":
            loaded.append(load(x, (rows,), rows_in))
        elif kind == "Halves":
            loaded += [load(x, (rows, first + columns), inside) for first in (0, x.shape[1] // 2)]
        elif kind == "Gathered":
            # Without a mask, so that no predicate keeps a thread's loads of indices from being issued all at once.
            indices = ref[f"indices{n}"]
            source = jnp.clip(load(indices, (jnp.minimum(rows, indices.shape[0] - 1),)), 0, x.shape[0] - 1)
            loaded.append(load(x, (source, columns), inside))
        elif kind == "Beside":
            F, cols = x.shape[1], grid.tiles.cols
            in_left = grid.index(j) < F // cols if F % cols == 0 else columns < F
            left = load(x, (rows, columns), both(rows_in, in_left))
            # Into the same registers: a thread waits for the first load only where the second one is masked off.
            loaded.append(load(ref[f"right{n}"], (rows, columns - F), both(inside, ~in_left), other=left))
        else:
            loaded.append(load(x, (rows, columns), inside))
    if computation.compute is None:
        return loaded, ()
    tensors, addends = computation.compute(*map(widened, loaded))
    return [tensor.astype(computation.dtype) for tensor in tensors], addends
