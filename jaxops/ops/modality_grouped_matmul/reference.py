"""The op in float32 and plain jnp, for tests; its gradients are JAX autodiff's. Holds [G, M, K] in memory."""

import jax
import jax.numpy as jnp

from jaxops._lib.ragged.offsets import runs


def modality_grouped_matmul_reference(lhs, rhs, group_offsets, *, transpose_rhs=False) -> jax.Array:
    """float32 [M, N]; arguments as `jaxops.modality_grouped_matmul`."""
    M, G = lhs.shape[0], group_offsets.shape[0] - 1
    matrices = [(jnp.swapaxes(w, 1, 2) if transpose_rhs else w).astype(jnp.float32) for w in rhs]
    out, first = jnp.zeros((M, max(w.shape[2] for w in matrices)), jnp.float32), 0
    for w in matrices:
        lo, hi = runs(lambda i: group_offsets[i], 1 + first + jnp.arange(w.shape[0]), G, M)
        own = (lo[:, None] <= jnp.arange(M)[None, :]) & (jnp.arange(M)[None, :] < hi[:, None])
        rows = jnp.where(own[:, :, None], lhs[:, : w.shape[1]].astype(jnp.float32)[None], 0)
        product = jnp.einsum("gmk,gkn->mn", rows, w, precision="highest")
        out += jnp.pad(product, ((0, 0), (0, out.shape[1] - w.shape[2])))
        first += w.shape[0]
    return out
