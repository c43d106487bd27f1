"""How a tile of the tensor lies in a program's threads, and where tiles are, shared by the kernels of both passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.fp8 import BLOCK, magnitudes
from jaxops.ops.quantize.plan import Tiles

ROWS, BLOCKS, COLUMNS = (
    (0, 1, 5),
    (2,),
    (4, 3),
)  # axes of a tile's array; those of its columns in the order in which a reduction is cheapest


@dataclasses.dataclass(frozen=True)
class Grid:
    """A tile as a six-dimensional array: (patch, far, blocks, chunks, vector, near).

    Row (far * near + near's index) * patch + patch's index; a column is one of `vector` neighbours, 16 bytes, in one of the chunks of a block. Triton
    hands out the axis of neighbours to registers, then `near`, chunks and far to threads and warps, and the patch to registers again. So each thread
    loads 16 bytes of each of `patch` rows and holds what is `patch` consecutive bytes of a transposed FP8 tile; and the threads that are near write the
    next bytes.
    """

    tile: Tiles
    vector: int
    width: int  # of a block

    @classmethod
    def of(cls, tile: Tiles, itemsize: int, by_blocks: bool) -> "Grid":
        width = min(BLOCK, tile.cols) if by_blocks else tile.cols
        return cls(tile, min(16 // itemsize, width), width)

    @property
    def shape(self) -> tuple[int, ...]:
        t = self.tile
        return (
            t.patch,
            t.rows // (t.patch * t.near),
            t.cols // self.width,
            self.width // self.vector,
            self.vector,
            t.near,
        )

    def _along(self, axis: int) -> jax.Array:
        size = self.shape[axis]
        return lax.broadcast_in_dim(
            jnp.arange(size, dtype=jnp.int32), [size if i == axis else 1 for i in range(6)], (axis,)
        )

    @property
    def rows(self) -> jax.Array:
        return (self._along(1) * self.tile.near + self._along(5)) * self.tile.patch + self._along(0)

    @property
    def blocks(self) -> jax.Array:
        return self._along(2)

    @property
    def columns(self) -> jax.Array:
        return self._along(2) * self.width + self._along(3) * self.vector + self._along(4)


def sizes_of(x: jax.Array, interpret: bool) -> jax.Array:
    """|x| of what `infinity_to_nan` gave.

    On a GPU a maximum ignores NaN, and no instruction is spent on leaving it out; but a maximum of NaN alone is NaN.
    """
    return magnitudes(x) if interpret else jnp.abs(x)


def largest(sizes: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    for axis in axes:
        if sizes.shape[axis] > 1:
            sizes = jnp.max(sizes, axis=axis, keepdims=True)
    return sizes


def both(*masks: jax.Array | None) -> jax.Array | None:
    """Where all masks hold; None is a mask that always does."""
    found = [mask for mask in masks if mask is not None]
    if not found:
        return None
    shape = np.broadcast_shapes(*(mask.shape for mask in found))
    result = jnp.broadcast_to(found[0], shape)
    for mask in found[1:]:
        result = result & jnp.broadcast_to(mask, shape)
    return result


def _shape(index: tuple[jax.Array, ...]) -> tuple[int, ...]:
    return np.broadcast_shapes(*(i.shape for i in index))


def load(ref, index, mask: jax.Array | None) -> jax.Array:
    """ref[index], zeros where mask does not hold."""
    if mask is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=jnp.broadcast_to(mask, _shape(index)), other=0.0)


def store(ref, index, value: jax.Array, mask: jax.Array | None) -> None:
    shape = _shape(index)
    plgpu.store(
        ref.at[index],
        jnp.broadcast_to(value, shape).astype(ref.dtype),
        mask=None if mask is None else jnp.broadcast_to(mask, shape),
    )
