"""What the routing kernels share: where the experts stand in a program's registers, a token's scores, a loop over its choices."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.powers import power_of_2
from jaxops.ops.route.plan import TINY, Spec, Tiles

_PLACES = 4  # neighbouring experts that a thread loads at once: 16 bytes of float32
_UNROLLED = 8  # choices a token up to which a loop over them is written out, so that all loads are on their way at once


@dataclasses.dataclass(frozen=True)
class Columns:
    """E experts as the columns of a register array: Triton's arrays are powers of two.

    With groups, columns are numbered by (part of a group, group, place in the part), each filled up to a power of two: so that a group's experts are
    in few lanes and many registers of each, where the largest of them is found with 2 exchanges between lanes. In the order of the experts a group would
    be a register of all 32 lanes: 5 exchanges for every single group.
    """

    E: int
    groups: int = 1

    @property
    def size(self) -> int:
        """Experts of a group."""
        return self.E // self.groups

    @property
    def shape(self) -> tuple[int, int, int]:
        """Parts of a group, groups, and places of a part."""
        places = min(_PLACES, power_of_2(self.size))
        return power_of_2(self.size) // places, power_of_2(self.groups), places

    @property
    def width(self) -> int:
        return power_of_2(self.size) * power_of_2(self.groups)

    def _group_and_place(self) -> tuple[jax.Array, jax.Array]:
        """Of each column, [1, width]: its group, and its place among all those of the group."""
        column, (_, groups, places) = jnp.arange(self.width, dtype=jnp.int32)[None, :], self.shape
        if self.groups == 1:
            return jnp.zeros_like(column), column
        return column // places % groups, column // (groups * places) * places + column % places

    @property
    def full(self) -> bool:
        """Whether every column is an expert. Then no mask says so, and Triton sees that neighbours may be loaded together."""
        return self.width == self.E

    @property
    def experts(self) -> jax.Array:
        """[1, width] int32; E in a column that only fills up."""
        group, place = self._group_and_place()
        expert = group * self.size + place
        return expert if self.full else jnp.where((group < self.groups) & (place < self.size), expert, self.E)

    @property
    def inside(self) -> jax.Array:
        """[1, width]: which columns hold an expert."""
        return jnp.full((1, self.width), True) if self.full else self.experts < self.E

    def by_group(self, values: jax.Array) -> jax.Array:
        """values [rows, width] as [rows, parts, groups, places]."""
        return jnp.broadcast_to(values, (values.shape[0], self.width)).reshape(values.shape[0], *self.shape)

    def at(self, ref, row: jax.Array, row_in: jax.Array) -> tuple:
        """ref[row, experts], and the mask of a load or store there: [rows, width]. row, row_in: [rows, 1]."""
        shape = (row.shape[0], self.width)
        mask = jnp.broadcast_to(row_in, shape)
        return ref.at[row, self.experts], mask if self.full else mask & jnp.broadcast_to(self.inside, shape)

    def load(self, logits_ref, row: jax.Array, row_in: jax.Array) -> jax.Array:
        """The logits of the tokens row [rows, 1] as float32 [rows, width], -inf where there are none."""
        at, mask = self.at(logits_ref, row, row_in)
        return plgpu.load(at, mask=mask, other=-jnp.inf).astype(jnp.float32)

    def load_vector(self, ref, other) -> jax.Array:
        """ref [E] as [1, width]."""
        return (
            plgpu.load(ref.at[self.experts])
            if self.full
            else plgpu.load(ref.at[self.experts], mask=self.inside, other=other)
        )

    def store(self, ref, row: jax.Array, row_in: jax.Array, values: jax.Array) -> None:
        at, mask = self.at(ref, row, row_in)
        plgpu.store(at, values.astype(ref.dtype), mask=mask)


def steps_of(pid: jax.Array, tile: Tiles, T: int, body, carry):
    """Folds body(tokens [step, 1], which of them there are, carry) over a program's tokens."""

    def step(i, carry):
        row = (pid * tile.rows + i * tile.step + jnp.arange(tile.step, dtype=jnp.int32))[:, None]
        return body(row, row < T, carry)

    return step(0, carry) if tile.step == tile.rows else lax.fori_loop(0, tile.rows // tile.step, step, carry)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of a program's tokens; what fills up a row is zero in all of them.

    Attributes:
      softmax, scores: [rows, width], of the logits; the scores that weights are made of.
      share: [rows, width], each score over `total`, their sum (softmax: over 1).
      top, exps: [rows, 1], the largest logit, and the sum of the exponentials of all others less it.
      total: [rows, 1].
    """

    softmax: jax.Array
    scores: jax.Array
    share: jax.Array
    top: jax.Array
    exps: jax.Array
    total: jax.Array

    @classmethod
    def of(cls, logits: jax.Array, spec: Spec) -> "Scores":
        top = jnp.max(logits, axis=1, keepdims=True)
        softmax = jnp.exp(logits - top)
        exps = jnp.sum(softmax, axis=1, keepdims=True)
        softmax = softmax / exps
        if spec.score == "softmax":
            return cls(softmax, softmax, softmax, top, exps, jnp.ones_like(top))
        scores = jax.nn.sigmoid(logits)
        total = jnp.sum(scores, axis=1, keepdims=True) + TINY
        return cls(softmax, scores, scores / total, top, exps, total)

    @property
    def logsumexp(self) -> jax.Array:
        """[rows, 1]"""
        return self.top + jnp.log(self.exps)

    def score_of(self, logits: jax.Array, spec: Spec) -> jax.Array:
        """The scores of some of the tokens' own logits."""
        return jnp.exp(logits - self.top) / self.exps if spec.score == "softmax" else jax.nn.sigmoid(logits)


def each(k: int, body, carry):
    """Folds body(j, carry) over a token's choices."""
    if k > _UNROLLED:
        return lax.fori_loop(0, k, body, carry)
    for j in range(k):
        carry = body(jnp.int32(j), carry)
    return carry


def load_column(ref, row: jax.Array, row_in: jax.Array, j: jax.Array, other) -> jax.Array:
    """ref[row, j] of ref [T, k] as [rows, 1]."""
    return plgpu.load(ref.at[row, jnp.broadcast_to(j, row.shape)], mask=row_in, other=other)
