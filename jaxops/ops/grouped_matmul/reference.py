"""The ops in float32 and plain jnp, for tests; their gradients are JAX autodiff's. Holds [G, M, K] in memory."""

import jax
import jax.numpy as jnp

from jaxops._lib.ragged.offsets import runs


def _rows_of_groups(offsets: jax.Array, M: int) -> jax.Array:
    """[G, M] bool: whether a row belongs to a group."""
    G = offsets.shape[0] - 1
    lo, hi = runs(lambda i: offsets[i], jnp.arange(1, G + 1), G, M)
    row = jnp.arange(M)[None, :]
    return (lo[:, None] <= row) & (row < hi[:, None])


def grouped_matmul_reference(lhs, rhs, group_offsets, *, transpose_rhs=False, bias=None) -> jax.Array:
    """float32 [M, N]; arguments as `jaxops.grouped_matmul`."""
    own = _rows_of_groups(group_offsets, lhs.shape[0])
    rows = jnp.where(own[:, :, None], lhs.astype(jnp.float32), 0.0)
    out = jnp.einsum(
        "gmk,gnk->mn" if transpose_rhs else "gmk,gkn->mn", rows, rhs.astype(jnp.float32), precision="highest"
    )
    if bias is not None:
        out += jnp.einsum("gm,gn->mn", own.astype(jnp.float32), bias.astype(jnp.float32), precision="highest")
    return out


def grouped_wgrad_reference(lhs, dout, group_offsets, *, accumulate_into=None) -> jax.Array:
    """float32 [G, K, N]; arguments as `jaxops.grouped_wgrad`."""
    own = _rows_of_groups(group_offsets, lhs.shape[0])[:, :, None]
    out = jnp.einsum(
        "gmk,gmn->gkn",
        jnp.where(own, lhs.astype(jnp.float32), 0.0),
        jnp.where(own, dout.astype(jnp.float32), 0.0),
        precision="highest",
    )
    return out if accumulate_into is None else out + accumulate_into.astype(jnp.float32)
