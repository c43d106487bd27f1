"""Attention within sequences that are packed one after another."""

import importlib
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxops.offload import named

Way = Literal["dense", "banded", "cudnn"]
NAME = "attention"  # of all that its backward needs (`jaxops.offload`)


def segments(sequence_offsets: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Each row's sequence, int32 [rows] from 0 to B - 1, and whether it is in one, bool [rows]."""
    # By comparison with every offset: searchsorted would be a while loop in every layer.
    at = jnp.sum(sequence_offsets[None, :] <= jnp.arange(rows, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32) - 1
    B = sequence_offsets.shape[0] - 1
    return jnp.clip(at, 0, B - 1), (at >= 0) & (at < B)


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sequence_offsets: jax.Array,
    *,
    causal: bool = False,
    way: Way = "dense",
    longest: int | None = None,
    crowd: int | None = None,
) -> jax.Array:
    """Softmax attention of each row over the rows of its own sequence, with `causal` only up to itself.

    The lengths stay on the device. Rows outside all sequences are zero. Residuals are named "attention".

    Args:
      q: [T, heads, head_dim].
      k, v: [T, kv_heads, head_dim]; heads / kv_heads queries share a key and a value.
      sequence_offsets: [B + 1] int32; sequence s is rows `sequence_offsets[s]` to `sequence_offsets[s + 1] - 1`.
      way: "dense" masks all T * T pairs. "banded" compares each block of `longest` rows with itself and its two
        neighbours, 3 * T * longest pairs. "cudnn" computes only pairs within sequences, by cuDNN's ragged layout, on a
        GPU, in bfloat16 or float16; it is the fastest (packed_attention.jsonl).
      longest: rows of the longest sequence; required for "banded", all rows by default for "cudnn". A longer sequence
        is truncated by "banded", and makes all results NaN by "cudnn".
      crowd: for "cudnn", at most how many sequences start within rows 0 to longest - 1, longest to 2 * longest - 1 and
        so on; B by default. cuDNN's time and memory grow with it: a step of the DiT takes 171 ms with 4, 185 with 64
        (H200, 2026-11-22). More sequences make all results NaN.

    Returns:
      [T, heads, head_dim].

    Raises:
      ValueError: an unknown way, "banded" without longest, or "cudnn" of float32.
    """
    if way not in get_args(Way):
        raise ValueError(f"way is {way!r}; it must be one of {', '.join(map(repr, get_args(Way)))}.")
    sequence, inside = segments(sequence_offsets, q.shape[0])
    q, k, v = (jnp.where(inside[:, None, None], x, 0) for x in (q, k, v))
    if way == "cudnn":
        out = _cudnn(q, k, v, sequence_offsets, causal, longest or q.shape[0], crowd or sequence_offsets.shape[0] - 1)
    elif way == "dense":
        # A row outside attends to the sequence of its clipped index: finite, and zeroed below.
        mask = _may_see(sequence, sequence, inside)
        out = attend(q[None], k[None], v[None], mask[None, None], causal)[0]
    elif longest is None:
        raise ValueError("way='banded' needs longest, the rows of the longest sequence that may come.")
    else:
        out = _banded(q, k, v, sequence, inside, causal, longest)
    return jnp.where(inside[:, None, None], out, 0)


def _cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, sequence_offsets: jax.Array, causal: bool, longest: int, crowd: int
) -> jax.Array:
    """By cuDNN's ragged layout, for which JAX has no public name.

    It takes sequences by rows of the array, and computes as if each row had as many as the fullest and all were as long
    as a row: so rows of `longest`, which sequences may cross.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"way='cudnn' has no {q.dtype}: take bfloat16 or float16, or way='dense'.")
    cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    T = q.shape[0]
    rows, crowd = -(-T // longest), max(2, crowd)  # of a single one a row it wants another layout
    q, k, v = (
        jnp.pad(x, ((0, rows * longest - T), (0, 0), (0, 0))).reshape(rows, longest, *x.shape[1:]) for x in (q, k, v)
    )
    starts, lengths, fits = sequences_by_row(jnp.clip(sequence_offsets, 0, T), rows, longest, crowd)
    how = {
        "mask_type": cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING,
        "scale": q.shape[-1] ** -0.5,
        "qkv_layout": "BTNH",
    }

    def ragged(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, lengths: jax.Array) -> jax.Array:
        return cudnn.dot_product_attention(
            q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=starts, kv_offsets=starts, **how
        )

    out = named(ragged, NAME)(q, k, v, starts, lengths)
    return jnp.where(fits, out.reshape(-1, *out.shape[2:])[:T], jnp.nan)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    causal: bool,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> jax.Array:
    """`jax.nn.dot_product_attention` with named residuals."""
    how = {"is_causal": causal, "implementation": implementation}
    return named(lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask, **how), NAME)(q, k, v, mask)


def sequences_by_row(offsets: jax.Array, rows: int, longest: int, crowd: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The nonempty sequences of offsets [B + 1] from 0 to rows * longest, by the row of `longest` in which they start.

    Returns:
      (starts [rows, crowd + 1] within the row; lengths [rows, crowd], -1 for none; whether all sequences are there and
      none is too long).
    """
    starts, lengths = offsets[:-1], jnp.diff(offsets)
    there = lengths > 0
    row = jnp.where(there, starts // longest, rows)
    in_row = jnp.zeros(rows, jnp.int32).at[row].add(1, mode="drop")
    before = jnp.cumsum(in_row) - in_row
    place = jnp.cumsum(there) - 1 - before[row]
    empty = jnp.full((rows, crowd + 1), -1, jnp.int32)
    fits = jnp.all(~there | ((lengths <= longest) & (place < crowd)))
    return (
        empty.at[row, place].set(starts % longest, mode="drop"),
        empty[:, :-1].at[row, place].set(lengths, mode="drop"),
        fits,
    )


def _banded(
    q: jax.Array, k: jax.Array, v: jax.Array, sequence: jax.Array, inside: jax.Array, causal: bool, longest: int
) -> jax.Array:
    T = q.shape[0]
    more = -T % longest
    sequence, inside = jnp.pad(sequence, (0, more)), jnp.pad(inside, (0, more))
    row = jnp.arange(T + more, dtype=jnp.int32)
    q, k, v = (jnp.pad(x, ((0, more), (0, 0), (0, 0))) for x in (q, k, v))
    blocks = lambda x: x.reshape(-1, longest, *x.shape[1:])
    mask = jax.vmap(_may_see)(blocks(sequence), _neighbours(sequence, longest), _neighbours(inside, longest))
    if causal:
        mask &= _neighbours(row, longest)[:, None, :] <= blocks(row)[:, :, None]
    out = attend(blocks(q), _neighbours(k, longest), _neighbours(v, longest), mask[:, None], False)
    return out.reshape(-1, *q.shape[1:])[:T]


def _may_see(sequence: jax.Array, others: jax.Array, others_inside: jax.Array) -> jax.Array:
    return (sequence[:, None] == others[None, :]) & others_inside[None, :]


def _neighbours(x: jax.Array, longest: int) -> jax.Array:
    """[T, ...] -> [T / longest, 3 * longest, ...]: previous block, block, next block; 0 or False beyond the ends."""
    blocks = x.reshape(-1, longest, *x.shape[1:])
    none = jnp.zeros_like(blocks[:1])
    return jnp.concatenate([jnp.concatenate([none, blocks[:-1]]), blocks, jnp.concatenate([blocks[1:], none])], axis=1)
