"""Random packings and masks, the three backends, and a stand-in for cuDNN's ragged layout."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._lib.planning.device import Device
from jaxops.ops.packed_attention import Plan, Tiles

H200 = Device("NVIDIA H200", "gpu")
T, S, HEADS, KV_HEADS, DIM, B, LONGEST = 37, 41, 4, 2, 4, 5, 11
EXACT = {"precision": "highest"}
# Blocks smaller than the sequences and than the window, different in each pass; no size divides the rows.
PLANS = {"xla": Plan("xla", block=8), "pallas": Plan("pallas", fwd=Tiles(16, 32), dq=Tiles(32, 16), dkv=Tiles(16, 16))}


def arrays(
    seed: int, rows: int = T, keys: int | None = None, dim: int = DIM, values: int | None = None
) -> list[np.ndarray]:
    """q, k, v and a cotangent of the result. values: columns of v."""
    rng, keys, values = np.random.default_rng(seed), rows if keys is None else keys, values or dim
    shapes = (rows, HEADS, dim), (keys, KV_HEADS, dim), (keys, KV_HEADS, values), (rows, HEADS, values)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def ends_of(before: int, lengths: list[int], rows: int) -> np.ndarray:
    return np.minimum(np.cumsum([before, *lengths]), rows).astype(np.int32)


# Eagerly each operation would be a program of its own. As there, every one rounds its result.
jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})


def with_gradients(function, *operands) -> tuple[jax.Array, ...]:
    """The last operand is the result's cotangent."""
    *operands, dout = operands
    out, vjp = jax.vjp(function, *operands)
    return out, *vjp(dout.astype(out.dtype))


def sinks_of(seed: int) -> np.ndarray:
    """One below, one above and some among the scores."""
    return (np.array([-30, 0, 3, 30]) + np.random.default_rng(seed).normal(size=HEADS)).astype(np.float32)


def cudnn_stand_in() -> types.SimpleNamespace:
    """The names of JAX's private module that the op uses, in plain jnp: rows of [rows, T, N, H] with several sequences
    each, which may cross into the next row; where one ends, -1 in place of a sequence."""

    def dot_product_attention(
        q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, mask_type, scale, qkv_layout
    ) -> jax.Array:
        rows, width, heads, dim = q.shape
        assert (qkv_layout, q_offsets.shape) == ("BTNH", (rows, q_seqlen.shape[1] + 1))
        assert q_seqlen.dtype == q_offsets.dtype == jnp.int32
        at = jnp.arange(rows * width)[None, None, :]
        start = jnp.arange(rows)[:, None] * width + q_offsets[:, :-1]
        inside = (start[..., None] <= at) & (at < (start + q_seqlen)[..., None]) & (q_seqlen > 0)[..., None]
        of = inside.reshape(-1, rows * width)
        mask = jnp.any(of[:, :, None] & of[:, None, :], axis=0)
        if mask_type == "causal":
            mask &= at[0, 0, :, None] >= at[0, 0, None, :]
        q, k, v = (x.reshape(rows * width, -1, dim).astype(jnp.float32) for x in (q, k, v))
        k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.where(mask[None], scale * jnp.einsum("tnh,snh->nts", q, k), -1e30)
        out = jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores, axis=-1), v)
        return out.reshape(rows, width, heads, dim).astype(jnp.bfloat16)

    masks = types.SimpleNamespace(PADDING="whole", PADDING_CAUSAL="causal")
    return types.SimpleNamespace(MaskType=masks, dot_product_attention=dot_product_attention)
