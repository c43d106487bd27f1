"""Ways to attend within packed sequences, each a function of packed q, k, v [T, N, H].

What they need to know about the lengths is made before the measurement.
"""

import importlib
import warnings
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from benchmarks.packing import Sequences, to_blocks, to_packed

Attend = Callable[[jax.Array, jax.Array, jax.Array, Sequences], jax.Array]


def masked(implementation: Literal["xla", "cudnn"]) -> Attend:
    """jax.nn.dot_product_attention with a boolean [T, T] mask. cuDNN takes it as a bias."""

    def attend(q, k, v, sequences):
        mask = (sequences.ids[:, None] == sequences.ids[None, :])[None, None]
        return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=mask, implementation=implementation)[0]

    return attend


def padded(implementation: Literal["xla", "cudnn"]) -> Attend:
    """jax.nn.dot_product_attention on blocks as long as the longest sequence; conversions included."""

    def attend(q, k, v, sequences):
        lengths = jnp.diff(sequences.offsets)
        q, k, v = (to_blocks(x, sequences) for x in (q, k, v))
        out = jax.nn.dot_product_attention(
            q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths, implementation=implementation
        )
        return to_packed(out, sequences)

    return attend


def ragged(mask_type: str) -> Attend:
    """cuDNN's ragged layout: one batch of T rows with B segments, B > 1. JAX has no public name for it."""

    def attend(q, k, v, sequences):
        cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        offsets, lengths = sequences.offsets[None], jnp.diff(sequences.offsets)[None]
        where = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": offsets, "kv_offsets": offsets}
        scale = q.shape[-1] ** -0.5
        return cudnn.dot_product_attention(
            q[None], k[None], v[None], **where, scale=scale, mask_type=cudnn.MaskType[mask_type], qkv_layout="BTNH"
        )[0]

    return attend


def pallas_mha(backward_block: int) -> Attend:
    """JAX's Pallas kernel with segment_ids: it computes all T * T pairs, masked."""

    def attend(q, k, v, sequences):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            attention = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")
        back = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), backward_block)
        sizes = attention.BlockSizes(block_q=128, block_k=128, **back)
        interpret = jax.default_backend() != "gpu"
        return attention.mha(
            q[None],
            k[None],
            v[None],
            sequences.ids[None],
            sm_scale=q.shape[-1] ** -0.5,
            block_sizes=sizes,
            interpret=interpret,
        )[0]

    return attend


SIDES: dict[str, Attend] = {
    "xla_mask": masked("xla"),
    "xla_padded": padded("xla"),
    "cudnn_mask": masked("cudnn"),
    "cudnn_padded": padded("cudnn"),
    "cudnn_ragged": ragged("PADDING"),
    "cudnn_ragged_no_mask": ragged("NO_MASK"),
    "pallas_mha_32": pallas_mha(32),
    "pallas_mha_64": pallas_mha(64),
}


def fwd(attend: Attend) -> Callable:
    return lambda q, k, v, dout, sequences: {"out": attend(q, k, v, sequences)}


def fwd_bwd(attend: Attend) -> Callable:
    """The result and all gradients, so that XLA drops nothing."""

    def both(q, k, v, dout, sequences):
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, sequences), q, k, v)
        return {"out": out} | dict(zip(("dq", "dk", "dv"), vjp(dout), strict=True))

    return both


PASSES = {"fwd": fwd, "fwd+bwd": fwd_bwd}
