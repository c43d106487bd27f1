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
    q: jax.Array, k: jax.Array, v: jax.Array, sequence_offsets: jax.Array, *, causal: bool, scale: float
) -> jax.Array:
    """[T, N, H], differentiable by JAX's own rule; NaN in rows outside is read."""
    cudnn = _private()
    starts, lengths = nonempty_sequences(jnp.clip(sequence_offsets, 0, q.shape[0]))
    q, k, v = (x[None] for x in (q, k, v))
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
    return out[0]


def nonempty_sequences(offsets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """starts [1, B + 1] and lengths [1, B] of the sequences that are not empty, then -1. Of a single one cuDNN wants
    another layout, so B is at least 2."""
    offsets = offsets if offsets.shape[0] > 2 else jnp.append(offsets, offsets[-1])
    starts, lengths = offsets[:-1], jnp.diff(offsets)
    there = lengths > 0
    place = jnp.where(there, jnp.cumsum(there) - 1, offsets.shape[0])
    empty = jnp.full((1, offsets.shape[0]), -1, jnp.int32)
    return empty.at[0, place].set(starts, mode="drop"), empty[:, :-1].at[0, place].set(lengths, mode="drop")
