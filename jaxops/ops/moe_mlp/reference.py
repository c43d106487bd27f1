"""The op in plain jnp and float32; its gradient is JAX autodiff's. For tests: it allocates [T, k, D, F]."""

import jax
import jax.numpy as jnp

from jaxops._lib.numerics.activations import activate, linear_part
from jaxops.ops.route import Routing


def moe_mlp_reference(
    x, w_gate, w_up, w_down, routing: Routing, *, biases=None, activation="silu"
) -> jax.Array:  # fmt: skip
    """float32 [T, N]; arguments as `jaxops.moe_mlp`. A choice goes to the expert in whose group its row lies."""
    position, offsets = routing.row_positions, routing.group_offsets
    expert = jnp.sum(offsets[None, None, :] <= position[:, :, None], axis=2) - 1  # [T, k]
    kept = (position >= offsets[0]) & (position < offsets[-1])
    expert = jnp.clip(expert, 0, w_down.shape[0] - 1)
    wide = lambda a: a.astype(jnp.float32)

    def product(form: str, rows: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        out = jnp.einsum(form, rows, wide(w)[expert], precision="highest")
        return out if bias is None else out + wide(bias)[expert]

    *of_unit, b_down = biases or (None, None, None)
    pre = [
        product("td,tjdf->tjf", wide(x), w, b) for w, b in zip((w_gate, w_up), of_unit, strict=True) if w is not None
    ]
    gate, *up = jnp.split(pre[0], 2, axis=2) if w_up is None else pre
    h = activate(gate, activation) * (linear_part(activation, up[0])[0] if up else 1)
    y = product("tjf,tjfn->tjn", h, w_down, b_down)
    return jnp.sum(jnp.where(kept[:, :, None], routing.weights[:, :, None] * y, 0), axis=1)
