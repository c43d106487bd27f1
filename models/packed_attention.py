"""Attention between the rows of one sequence, for sequences that are packed one after another."""

from typing import Literal

import jax
import jax.numpy as jnp

Way = Literal["dense", "banded"]


def segments(sequence_offsets: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Each row's sequence, int32 [rows] within 0 to B - 1, and whether it has one, bool [rows]."""
    # Comparing with every offset: searchsorted's own loop would be a while loop in every layer.
    at = jnp.sum(sequence_offsets[None, :] <= jnp.arange(rows, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32) - 1
    B = sequence_offsets.shape[0] - 1
    return jnp.clip(at, 0, B - 1), (at >= 0) & (at < B)


def packed_attention(q: jax.Array, k: jax.Array, v: jax.Array, sequence_offsets: jax.Array, *, way: Way = "dense", longest: int | None = None) -> jax.Array:
    """Softmax attention in which a row sees all rows of its own sequence and no other.

    The lengths stay on the device. Rows outside all sequences come out zero.

    Args:
      q, k, v: [T, heads, head_dim].
      sequence_offsets: [B + 1] int32; sequence s is the rows `sequence_offsets[s]` to `sequence_offsets[s + 1] - 1`.
      way: "dense" masks all T * T pairs; "banded" compares each block of `longest` rows with itself and its two neighbours only, which is all that a
        sequence of at most `longest` rows can reach: 3 * T * longest pairs.
      longest: rows of the longest sequence that may come, for "banded". A longer one would lose its far ends.

    Returns:
      [T, heads, head_dim].
    """
    if way not in ("dense", "banded"):
        raise ValueError(f"way is {way!r}; it must be 'dense' or 'banded'.")
    T = q.shape[0]
    sequence, inside = segments(sequence_offsets, T)
    q, k, v = (jnp.where(inside[:, None, None], x, 0) for x in (q, k, v))
    if way == "dense":
        # A row outside sees the rows of the sequence that its index was clipped to: finite, and taken away below.
        out = jax.nn.dot_product_attention(q[None], k[None], v[None], mask=_may_see(sequence, sequence, inside)[None, None])[0]
        return jnp.where(inside[:, None, None], out, 0)
    if longest is None:
        raise ValueError("way='banded' needs longest, the rows of the longest sequence that may come.")
    more = -T % longest
    sequence, inside = jnp.pad(sequence, (0, more)), jnp.pad(inside, (0, more))
    q, k, v = (jnp.pad(x, ((0, more), (0, 0), (0, 0))) for x in (q, k, v))
    queries = q.reshape(-1, longest, *q.shape[1:])
    mask = jax.vmap(_may_see)(sequence.reshape(-1, longest), _neighbours(sequence, longest), _neighbours(inside, longest))
    out = jax.nn.dot_product_attention(queries, _neighbours(k, longest), _neighbours(v, longest), mask=mask[:, None])
    return jnp.where(inside[:, None, None], out.reshape(q.shape), 0)[:T]


def _may_see(sequence: jax.Array, others: jax.Array, others_inside: jax.Array) -> jax.Array:
    return (sequence[:, None] == others[None, :]) & others_inside[None, :]


def _neighbours(x: jax.Array, longest: int) -> jax.Array:
    """[T, ...] -> [T / longest, 3 * longest, ...]: the block before, each block, the block after; zero (or False) where there is none."""
    blocks = x.reshape(-1, longest, *x.shape[1:])
    none = jnp.zeros_like(blocks[:1])
    return jnp.concatenate([jnp.concatenate([none, blocks[:-1]]), blocks, jnp.concatenate([blocks[1:], none])], axis=1)
