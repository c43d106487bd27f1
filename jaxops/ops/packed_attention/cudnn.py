"""cuDNN's ragged layout, for which JAX has no public name: this file alone uses the private ones."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_NAMES = ("MaskType", "dot_product_attention")


def _private() -> Any:
    """JAX's module, or None where a version of JAX has it no more."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError:
        return None
    return module if all(hasattr(module, name) for name in _NAMES) else None


def cudnn_missing() -> str:
    """What of it this version of JAX lacks; "" if nothing."""
    return "" if _private() is not None else f"JAX {jax.__version__} has no {_MODULE} with {' and '.join(_NAMES)}"


def attend_cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, sequence_offsets: jax.Array, *, causal: bool, scale: float, longest: int,
    crowd: int,
) -> jax.Array:  # fmt: skip
    """[T, N, H], differentiable by JAX's own rule; NaN in rows outside is read.

    cuDNN takes sequences by rows of an array, and computes as if each row had as many as the fullest and all were as
    long as a row: so rows of `longest`, which sequences may cross.
    """
    cudnn = _private()
    T = q.shape[0]
    rows, crowd = -(-T // longest), max(2, crowd)  # of a single one a row it wants another layout
    q, k, v = (
        jnp.pad(x, ((0, rows * longest - T), (0, 0), (0, 0))).reshape(rows, longest, *x.shape[1:]) for x in (q, k, v)
    )
    starts, lengths, fits = sequences_by_row(jnp.clip(sequence_offsets, 0, T), rows, longest, crowd)
    out = cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        mask_type=cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING,
        scale=scale,
        qkv_layout="BTNH",
    )
    return jnp.where(fits, out.reshape(-1, *out.shape[2:])[:T], jnp.nan)


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
