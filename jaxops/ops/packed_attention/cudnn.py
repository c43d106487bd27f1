"""cuDNN's ragged layout, for which JAX has no public name: this file alone uses the private ones."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._lib.planning.device import Device
from jaxops._lib.planning.plans import AMPERE

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_NAMES = ("MaskType", "dot_product_attention")


def _private() -> Any:
    """JAX's module, or None where a version of JAX has it no more."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError:
        return None
    return module if all(hasattr(module, name) for name in _NAMES) else None


def cudnn_cannot(dtype: str, head_dim: int, *, plain: bool, device: Device) -> str:
    """Why cuDNN cannot run it; "" where it can.

    Args:
      plain: whether the mask is causal or none, and queries and keys are in one packing.
    """
    if not device.has(AMPERE):
        return f"it needs an NVIDIA GPU of compute capability 8.0 or newer, and this is {device.kind}"
    if dtype == "float32":
        return "it has bfloat16 and float16 only, and q is float32"
    if not plain:
        return "its ragged layout has no window, no visible_until and no kv_offsets"
    if head_dim % 8 or head_dim > 128:
        return f"it takes a head_dim of at most 128, a multiple of 8, and this is {head_dim}"
    if _private() is None:
        return f"JAX {jax.__version__} has no {_MODULE} with {' and '.join(_NAMES)}"
    return ""


def attend_cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sequence_offsets: jax.Array,
    *,
    causal: bool,
    scale: float,
    longest: int,
    crowd: int,
) -> jax.Array:
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
