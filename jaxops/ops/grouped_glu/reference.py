"""The op in float32 and plain jnp, for tests; its gradient is JAX autodiff's. Holds [G, M, K] in memory."""

import jax
import jax.numpy as jnp

from jaxops._lib.numerics.activations import activate


def grouped_glu_reference(x, w_gate, w_up, group_offsets, *, activation="silu") -> jax.Array:
    """float32 [M, F]; arguments as `jaxops.grouped_glu`."""
    if w_up is None:
        w_gate, w_up = jnp.split(w_gate, 2, axis=2)
    row = jnp.arange(x.shape[0])[None, :]
    own = (group_offsets[:-1, None] <= row) & (row < group_offsets[1:, None])  # [G, M]
    rows = jnp.where(own[:, :, None], x.astype(jnp.float32), 0.0)
    gate, up = (jnp.einsum("gmk,gkf->mf", rows, w.astype(jnp.float32), precision="highest") for w in (w_gate, w_up))
    return jnp.where(jnp.any(own, axis=0)[:, None], activate(gate, activation) * up, 0.0)
