"""The op in float32 and plain jnp, for tests; its gradient is JAX autodiff's. Holds [G, M, K] in memory."""

import jax
import jax.numpy as jnp

from jaxops._lib.numerics.activations import activate, linear_part


def grouped_glu_reference(x, w_gate, w_up, group_offsets, *, biases=None, activation="silu") -> jax.Array:
    """float32 [M, F]; arguments as `jaxops.grouped_glu`."""
    row = jnp.arange(x.shape[0])[None, :]
    own = ((group_offsets[:-1, None] <= row) & (row < group_offsets[1:, None])).astype(jnp.float32)  # [G, M]
    rows = jnp.where(own[:, :, None] > 0, x.astype(jnp.float32), 0.0)

    def product(w: jax.Array, bias: jax.Array | None) -> jax.Array:
        out = jnp.einsum("gmk,gkf->mf", rows, w.astype(jnp.float32), precision="highest")
        return out if bias is None else out + jnp.matmul(own.T, bias.astype(jnp.float32), precision="highest")

    pre = [product(w, b) for w, b in zip((w_gate, w_up), biases or (None, None), strict=True) if w is not None]
    gate, up = jnp.split(pre[0], 2, axis=1) if w_up is None else pre
    h = activate(gate, activation) * linear_part(activation, up)[0]
    return jnp.where(jnp.any(own > 0, axis=0)[:, None], h, 0.0)
