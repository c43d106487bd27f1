"""Conversion between packed rows and blocks of equal length."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import visible_from, visible_until

_LONGEST_MULTIPLE = 128


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("offsets", "ids", "first", "until"), meta_fields=("longest", "mask")
)
@dataclasses.dataclass(frozen=True)
class Sequences:
    """How rows are packed, and which see each other.

    Attributes:
      offsets: [B + 1], of the sequences.
      ids: [T], each row's sequence.
      first, until: [T], the first row that each row sees, and the first after it that it sees no more.
      longest: a static bound of the lengths.
      mask: of `shapes.ATTENTION_MASKS`.
    """

    offsets: jax.Array
    ids: jax.Array
    first: jax.Array
    until: jax.Array
    longest: int
    mask: str

    @classmethod
    def of(cls, offsets: np.ndarray, mask: str = "whole") -> "Sequences":
        lengths = np.diff(offsets)
        longest = -(-int(lengths.max()) // _LONGEST_MULTIPLE) * _LONGEST_MULTIPLE
        ids = jnp.asarray(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
        first, until = (jnp.asarray(of(mask, offsets)) for of in (visible_from, visible_until))
        return cls(jnp.asarray(offsets), ids, first, until, longest, mask)

    def rows(self) -> tuple[jax.Array, jax.Array]:
        """For each position in [B, longest] blocks: the packed row, and whether the sequence reaches it."""
        at = self.offsets[:-1, None] + jnp.arange(self.longest, dtype=jnp.int32)[None, :]
        return jnp.minimum(at, self.ids.shape[0] - 1), at < self.offsets[1:, None]

    def places(self) -> tuple[jax.Array, jax.Array]:
        """For each packed row: its block, and its position there."""
        return self.ids, jnp.arange(self.ids.shape[0], dtype=jnp.int32) - self.offsets[self.ids]


@jax.custom_vjp
def to_blocks(packed: jax.Array, sequences: Sequences) -> jax.Array:
    """[T, N, H] -> [B, longest, N, H], zero past a sequence's end. Its transpose is a gather; JAX would scatter."""
    rows, inside = sequences.rows()
    return jnp.where(inside[:, :, None, None], packed[rows], 0)


@jax.custom_vjp
def to_packed(blocks: jax.Array, sequences: Sequences) -> jax.Array:
    return blocks[sequences.places()]


to_blocks.defvjp(
    lambda packed, sequences: (to_blocks(packed, sequences), sequences),
    lambda sequences, grad: (to_packed(grad, sequences), None),
)
to_packed.defvjp(
    lambda blocks, sequences: (to_packed(blocks, sequences), sequences),
    lambda sequences, grad: (to_blocks(grad, sequences), None),
)
