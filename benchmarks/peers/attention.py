"""Ways to attend within packed sequences, each a function of packed q [T, N, H] and k, v [T, K, H].

What they need to know about the lengths is made before the measurement.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jaxops
from benchmarks.harness.packing import Sequences, to_blocks, to_packed
from benchmarks.shapes import WINDOWS
from jaxops.ops.packed_attention import Plan

Attend = Callable[[jax.Array, jax.Array, jax.Array, Sequences], jax.Array]


def own(plan: Plan | None = None) -> Attend:
    """`jaxops.packed_attention`: as a user calls it, or by a plan."""

    def attend(q, k, v, sequences):
        how: dict[str, Any] = {"plan": plan, "causal": sequences.mask in ("causal", *WINDOWS)}
        how |= {"visible_until": sequences.until} if sequences.mask == "text_and_images" else {}
        how |= {"window": WINDOWS[sequences.mask] - 1} if sequences.mask in WINDOWS else {}
        return jaxops.packed_attention(q, k, v, sequences.offsets, **how)

    return attend


def masked(implementation: Literal["xla", "cudnn"]) -> Attend:
    """jax.nn.dot_product_attention with a boolean [T, T] mask. cuDNN takes it as a bias."""

    def attend(q, k, v, sequences):
        row = jnp.arange(q.shape[0], dtype=jnp.int32)
        mask = (row[None, :] >= sequences.first[:, None]) & (row[None, :] < sequences.until[:, None])
        how: dict[str, Any] = {"mask": mask[None, None], "implementation": implementation}
        return jax.nn.dot_product_attention(q[None], k[None], v[None], **how)[0]

    return attend


def padded(implementation: Literal["xla", "cudnn"]) -> Attend:
    """jax.nn.dot_product_attention on blocks as long as the longest sequence; conversions included."""

    def attend(q, k, v, sequences):
        lengths = jnp.diff(sequences.offsets)
        q, k, v = (to_blocks(x, sequences) for x in (q, k, v))
        how: dict[str, Any] = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
        if sequences.mask not in ("whole", "causal"):
            rows, _ = sequences.rows()
            of_rows = rows[:, None, :]
            mask = (of_rows >= sequences.first[rows][:, :, None]) & (of_rows < sequences.until[rows][:, :, None])
            how = {"mask": mask[:, None]} | how
        causal = sequences.mask == "causal"
        out = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation, **how)
        return to_packed(out, sequences)

    return attend


SIDES: dict[str, Attend] = {
    "jaxops": own(),
    "jaxops_cudnn": own(Plan("cudnn")),
    "jaxops_pallas": own(Plan("pallas")),
    "jaxops_blocks": own(Plan("xla")),
    "xla_mask": masked("xla"),
    "xla_padded": padded("xla"),
    "cudnn_mask": masked("cudnn"),
    "cudnn_padded": padded("cudnn"),
}
TORCH = "torch_flash"  # in a process of its own: torch_attention.py


def fwd(attend: Attend) -> Callable:
    return lambda q, k, v, dout, sequences: {"out": attend(q, k, v, sequences)}


def fwd_bwd(attend: Attend) -> Callable:
    """The result and all gradients, so that XLA drops nothing."""

    def both(q, k, v, dout, sequences):
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, sequences), q, k, v)
        return {"out": out} | dict(zip(("dq", "dk", "dv"), vjp(dout), strict=True))

    return both


PASSES = {"fwd": fwd, "fwd+bwd": fwd_bwd}
