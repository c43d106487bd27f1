"""What the routing kernels share: where the experts stand in a program's registers, a token's scores, a loop over its choices."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jaxops.ops.route.plan import TINY, Spec, power_of_2

_UNROLLED = 8  # choices a token up to which a loop over them is written out, so that all loads are on their way at once


@dataclasses.dataclass(frozen=True)
class Columns:
    """E experts as the columns of a register array: Triton's arrays are powers of two. Each group fills up a power of two of its own."""

    E: int
    groups: int = 1

    @property
    def size(self) -> int:
        """Experts of a group."""
        return self.E // self.groups

    @property
    def shape(self) -> tuple[int, int]:
        """Groups and columns of each, filled up."""
        return power_of_2(self.groups), power_of_2(self.size)

    @property
    def width(self) -> int:
        return self.shape[0] * self.shape[1]

    def expert(self, column: jax.Array) -> jax.Array:
        """The expert of a column; of one that only fills up, some number."""
        return column if self.groups == 1 else column // self.shape[1] * self.size + column % self.shape[1]

    @property
    def experts(self) -> jax.Array:
        """[1, width] int32."""
        return self.expert(jnp.arange(self.width, dtype=jnp.int32)[None, :])

    @property
    def inside(self) -> jax.Array:
        """[1, width]: which columns hold an expert."""
        column = jnp.arange(self.width, dtype=jnp.int32)[None, :]
        return (column // self.shape[1] < self.groups) & (column % self.shape[1] < self.size)

    def load(self, logits_ref, row: jax.Array, row_in: jax.Array) -> jax.Array:
        """The logits of the tokens row [rows, 1] as float32 [rows, width], -inf where there are none."""
        mask = jnp.broadcast_to(row_in & self.inside, (row.shape[0], self.width))
        return plgpu.load(logits_ref.at[row, self.experts], mask=mask, other=-jnp.inf).astype(jnp.float32)


def rows_of(pid: jax.Array, rows: int, T: int) -> tuple[jax.Array, jax.Array]:
    """A program's tokens [rows, 1], and which of them there are."""
    row = (pid * rows + jnp.arange(rows, dtype=jnp.int32))[:, None]
    return row, row < T


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

