"""Shared by the routing kernels: the experts as register columns, a token's scores, loops over tokens and choices."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.powers import power_of_2
from jaxops.ops.route.plan import TINY, Spec, Tiles

_VECTOR = 4  # neighbouring experts in one load of a thread: 16 bytes of float32
# Scores up to this are exp(logits) times a number of the token, up to 1e-9 of them. Sums of larger scores do not notice
# TINY.
_SMALL = 1e-9
_MAX_UNROLLED = 8  # choices per token up to which a loop over them is unrolled: all loads are in flight at once


@dataclasses.dataclass(frozen=True)
class Columns:
    """E experts as the columns of a register array, whose sizes are powers of two in Triton.

    With groups the columns are numbered by (part of a group, group, expert of the part), each padded to a power of two.
    The experts of a group then lie in few lanes and many registers of each, and a maximum over a group takes 2
    shuffles. In the order of the experts a group would be a register of all 32 lanes: 5 shuffles for every group.
    """

    E: int
    groups: int = 1

    @property
    def size(self) -> int:
        """Experts per group."""
        return self.E // self.groups

    @property
    def shape(self) -> tuple[int, int, int]:
        """Parts of a group, groups, and experts of a part."""
        part = min(_VECTOR, power_of_2(self.size))
        return power_of_2(self.size) // part, power_of_2(self.groups), part

    @property
    def width(self) -> int:
        return power_of_2(self.size) * power_of_2(self.groups)

    @property
    def full(self) -> bool:
        """Whether every column is an expert. Without a mask Triton sees that neighbours can be loaded together."""
        return self.width == self.E

    @property
    def experts(self) -> jax.Array:
        """[1, width] int32; E in a column of padding."""
        column, (_, groups, part) = jnp.arange(self.width, dtype=jnp.int32)[None, :], self.shape
        group, member = jnp.zeros_like(column), column
        if self.groups > 1:
            group = column // part % groups
            member = column // (groups * part) * part + column % part
        expert = group * self.size + member
        return expert if self.full else jnp.where((group < self.groups) & (member < self.size), expert, self.E)

    @property
    def inside(self) -> jax.Array:
        """[1, width]: which columns are experts."""
        return jnp.full((1, self.width), True) if self.full else self.experts < self.E

    def by_group(self, values: jax.Array) -> jax.Array:
        """values [rows, width] as [rows, parts, groups, experts of a part]."""
        return jnp.broadcast_to(values, (values.shape[0], self.width)).reshape(values.shape[0], *self.shape)

    def at(self, ref, row: jax.Array, row_in: jax.Array) -> tuple:
        """ref[row, experts], and the mask of a load or store there: [rows, width]. row, row_in: [rows, 1]."""
        shape = (row.shape[0], self.width)
        mask = jnp.broadcast_to(row_in, shape)
        return ref.at[row, self.experts], mask if self.full else mask & jnp.broadcast_to(self.inside, shape)

    def load(self, logits_ref, row: jax.Array, row_in: jax.Array) -> jax.Array:
        """The logits of the tokens row [rows, 1] as float32 [rows, width], -inf in masked columns and rows."""
        at, mask = self.at(logits_ref, row, row_in)
        return plgpu.load(at, mask=mask, other=-jnp.inf).astype(jnp.float32)

    def load_vector(self, ref, other) -> jax.Array:
        """ref [E] as [1, width]."""
        mask = {} if self.full else {"mask": self.inside, "other": other}
        return plgpu.load(ref.at[self.experts], **mask)

    def store(self, ref, row: jax.Array, row_in: jax.Array, values: jax.Array) -> None:
        at, mask = self.at(ref, row, row_in)
        plgpu.store(at, values.astype(ref.dtype), mask=mask)


def each_step(pid: jax.Array, tile: Tiles, T: int, body, carry):
    """Folds body(tokens [step, 1], which of them exist, carry) over a program's tokens."""

    def step(i, carry):
        row = (pid * tile.rows + i * tile.step + jnp.arange(tile.step, dtype=jnp.int32))[:, None]
        return body(row, row < T, carry)

    return step(0, carry) if tile.step == tile.rows else lax.fori_loop(0, tile.rows // tile.step, step, carry)


def counted(ref: dict, row: jax.Array, exists: jax.Array) -> jax.Array:
    """[rows, 1] bool: which of the tokens row [rows, 1] that exist count."""
    return plgpu.load(ref["mask"].at[row], mask=exists, other=False) if "mask" in ref else exists


def summable(scores: jax.Array, logits: jax.Array, top: jax.Array, top_score: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores [T, n] in the range of float32, for quotients of a token's scores.

    Args:
      scores: softmax or sigmoid of logits [T, n].
      top, top_score: [T, 1], the largest logit and its score.

    Returns:
      The scores; where the largest one is small, exp(logits - top), which is the scores times a number of the token.
      And for which tokens, [T, 1] bool.
    """
    small = (top_score < _SMALL) & (top > -jnp.inf)
    return jnp.where(small, jnp.exp(logits - top), scores), small


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of a program's tokens; 0 in columns of padding.

    Attributes:
      softmax, scores: [rows, width], softmax of the logits; the scores that the weights are made of.
      values, small: as of `summable`; for softmax the scores and None.
      share: [rows, width], values / total.
      top, exps: [rows, 1], the largest logit, and the sum of exp(logits - top).
      total: [rows, 1], the sum of the values plus TINY; 1 for softmax.
    """

    softmax: jax.Array
    scores: jax.Array
    values: jax.Array
    small: jax.Array | None
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
            return cls(softmax, softmax, softmax, None, softmax, top, exps, jnp.ones_like(top))
        scores = jax.nn.sigmoid(logits)
        values, small = summable(scores, logits, top, jax.nn.sigmoid(top))
        total = jnp.sum(values, axis=1, keepdims=True) + TINY
        return cls(softmax, scores, values, small, values / total, top, exps, total)

    @property
    def logsumexp(self) -> jax.Array:
        """[rows, 1]"""
        return self.top + jnp.log(self.exps)

    def score_of(self, logits: jax.Array, spec: Spec) -> jax.Array:
        """The scores of some logits of these tokens."""
        return jnp.exp(logits - self.top) / self.exps if spec.score == "softmax" else jax.nn.sigmoid(logits)

    def summable(self, scores: jax.Array, logits: jax.Array, spec: Spec) -> tuple[jax.Array, jax.Array | None]:
        """`summable` of the chosen experts' scores; logits are -inf for the others. None for no token."""
        if not spec.biased and spec.score == "softmax":
            return scores, None  # the largest score is at least 1 / E
        # Without a bias the largest one is chosen (with groups, one of half its size).
        top = jnp.max(logits, axis=1, keepdims=True) if spec.biased else self.top
        return summable(scores, logits, top, self.score_of(top, spec))


def each_choice(k: int, body, carry):
    """Folds body(j, carry) over a token's choices."""
    if k > _MAX_UNROLLED:
        return lax.fori_loop(0, k, body, carry)
    for j in range(k):
        carry = body(jnp.int32(j), carry)
    return carry


def load_column(ref, row: jax.Array, row_in: jax.Array, j: jax.Array, other) -> jax.Array:
    """ref[row, j] of ref [T, k] as [rows, 1]."""
    return plgpu.load(ref.at[row, jnp.broadcast_to(j, row.shape)], mask=row_in, other=other)
