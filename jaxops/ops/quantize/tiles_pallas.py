"""Shared by the kernels: how a tile lies in a program's threads, and maxima over its axes."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.fp8 import BLOCK, magnitudes
from jaxops.ops.quantize.plan import Tiles

# Axes of a tile's array: of rows, and of columns in the order in which a reduction is cheapest.
ROWS, COLUMNS = (0, 1, 5), (4, 3)


@dataclasses.dataclass(frozen=True)
class Grid:
    """A tile as a six-dimensional array: (patch, far, blocks, chunks, vector, near).

    An element's row is (far * tiles.near + near) * tiles.patch + patch; its column is one of `vector` neighbours, 16
    bytes, of a chunk of a block. Triton assigns the vector axis to registers, then near, chunks and far to threads and
    warps, and patch to registers. So each thread loads 16 bytes of each of `patch` rows and holds `patch` consecutive
    bytes of a transposed FP8 tile, and the threads along near write the bytes after them.
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
        return t.patch, t.rows // (t.patch * t.near), t.cols // self.width, chunks, self.vector, t.near

    def _along(self, axis: int) -> jax.Array:
        size = self.shape[axis]
        shape = [size if i == axis else 1 for i in range(6)]
        return lax.broadcast_in_dim(jnp.arange(size, dtype=jnp.int32), shape, (axis,))

    @property
    def rows(self) -> jax.Array:
        return (self._along(1) * self.tiles.near + self._along(5)) * self.tiles.patch + self._along(0)

    @property
    def blocks(self) -> jax.Array:
        return self._along(2)

    @property
    def columns(self) -> jax.Array:
        return self._along(2) * self.width + self._along(3) * self.vector + self._along(4)


def sizes_of(x: jax.Array, interpret: bool) -> jax.Array:
    """|x| of the result of `infinity_to_nan`, for a maximum, which ignores NaN on a GPU unless all are NaN."""
    return magnitudes(x) if interpret else jnp.abs(x)


def largest(sizes: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    for axis in axes:
        if sizes.shape[axis] > 1:
            sizes = jnp.max(sizes, axis=axis, keepdims=True)
    return sizes


def index(value: int | jax.Array) -> jax.Array:
    """A scalar as an index array of six dimensions."""
    return jnp.full((1,) * 6, value, jnp.int32)
