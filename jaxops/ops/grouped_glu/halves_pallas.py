"""What the two activation kernels share: which rows and columns are a program's, and where gate and up lie."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops.ops.grouped_glu.plan import Tiles


@dataclasses.dataclass(frozen=True)
class Place:
    """rows [rows, 1] and columns [1, columns] of a program among [M, F], which of them there are, and which of these are in a group."""

    rows: jax.Array
    columns: jax.Array
    there: jax.Array
    inside: jax.Array

    @classmethod
    def of(cls, offsets_ref, M: int, F: int, block: Tiles) -> "Place":
        across, shape = pl.cdiv(F, block.columns), (block.rows, block.columns)
        program = pl.program_id(0)
        rows = (program // across * block.rows + jnp.arange(block.rows, dtype=jnp.int32))[:, None]
        columns = (program % across * block.columns + jnp.arange(block.columns, dtype=jnp.int32))[None, :]
        there = jnp.broadcast_to(rows < M, shape)
        if F % block.columns:
            there = there & jnp.broadcast_to(columns < F, shape)
        first, end = (plgpu.load(offsets_ref.at[jnp.full((1, 1), i, jnp.int32)]) for i in (0, offsets_ref.shape[0] - 1))
        return cls(rows, columns, there, there & jnp.broadcast_to((first <= rows) & (rows < end), shape))

    def load(self, ref, first: int = 0) -> jax.Array:
        """ref's columns from `first` on; zero outside the groups, whose rows are not read: of zeros every unit and every gradient is zero."""
        return plgpu.load(ref.at[self.rows, first + self.columns], mask=self.inside, other=0.0)

    def store(self, ref, value: jax.Array, first: int = 0) -> None:
        plgpu.store(ref.at[self.rows, first + self.columns], value.astype(ref.dtype), mask=self.there)


def halves_of(refs, F: int) -> list[tuple]:
    """(ref, first column) of gate and of up, which are one array's halves or an array each."""
    return [(refs[0], 0), (refs[-1], F if len(refs) == 1 else 0)]


def program_count(M: int, F: int, block: Tiles) -> int:
    return pl.cdiv(M, block.rows) * pl.cdiv(F, block.columns)
