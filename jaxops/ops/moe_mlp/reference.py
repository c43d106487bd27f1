"""The op in plain jnp and float32; its gradient is JAX autodiff's. For tests: it allocates [T, k, D, F]."""

import jax
import jax.numpy as jnp

from jaxops._lib.numerics.activations import activate
from jaxops.ops.route import Routing


def moe_mlp_reference(x, w_gate, w_up, w_down, routing: Routing, *, activation="silu") -> jax.Array:
    """float32 [T, N]; arguments as `jaxops.moe_mlp`. A choice goes to the expert in whose group its row lies."""
    x, w_gate, w_up, w_down = (a.astype(jnp.float32) for a in (x, w_gate, w_up, w_down))
    position, offsets = routing.row_positions, routing.group_offsets
    expert = jnp.sum(offsets[None, None, :] <= position[:, :, None], axis=2) - 1  # [T, k]
    kept = (position >= offsets[0]) & (position < offsets[-1])
    expert = jnp.clip(expert, 0, w_gate.shape[0] - 1)
    with jax.default_matmul_precision("highest"):
        gate, up = (jnp.einsum("td,tjdf->tjf", x, w[expert]) for w in (w_gate, w_up))
        y = jnp.einsum("tjf,tjfn->tjn", activate(gate, activation) * up, w_down[expert])
    return jnp.sum(jnp.where(kept[:, :, None], routing.weights[:, :, None] * y, 0), axis=1)
