"""The ops in float32 and plain jnp, for tests; JAX differentiates them. They hold a [T, B] matrix in memory."""

import jax
import jax.numpy as jnp

from jaxops._lib.numerics.activations import activate


def _member(offsets: jax.Array, T: int) -> tuple[jax.Array, jax.Array]:
    """[T, B] float32: 1 where a row is in a sequence; and [T, 1]: whether it is in any."""
    row = jnp.arange(T)[:, None]
    member = (offsets[None, :-1] <= row) & (row < offsets[None, 1:])
    return member.astype(jnp.float32), jnp.any(member, axis=1, keepdims=True)


def _of_rows(values: jax.Array, member: jax.Array, per_row: bool) -> jax.Array:
    """Each row's own vector [T, D]."""
    values = values.astype(jnp.float32)
    return values if per_row else jnp.matmul(member, values, precision="highest")


def gated_residual_reference(residual, h, gate, sequence_offsets, *, per_row=False) -> jax.Array:
    """float32 [T, D]; arguments as `jaxops.gated_residual`; per_row: gate has a vector for every row."""
    member, inside = _member(sequence_offsets, residual.shape[0])
    update = _of_rows(gate, member, per_row) * jnp.where(inside, h.astype(jnp.float32), 0)
    return residual.astype(jnp.float32) + jnp.where(inside, update, 0)


def adaln_reference(
    x, scale, shift, sequence_offsets, *, norm="layer", weight=None, bias=None, epsilon=1e-6, activation=None,
    per_row=False
) -> jax.Array:  # fmt: skip
    """float32 [T, D]; arguments as `jaxops.adaln`; per_row: scale and shift have a vector for every row."""
    member, inside = _member(sequence_offsets, x.shape[0])
    x = jnp.where(inside, x.astype(jnp.float32), 0)
    if norm == "layer":
        x = x - jnp.mean(x, axis=1, keepdims=True)
    y = x * jax.lax.rsqrt(jnp.mean(x**2, axis=1, keepdims=True) + epsilon)
    if weight is not None:
        y = y * weight.astype(jnp.float32)[None, :]
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :]
    y = activate(y, activation) * (1 + _of_rows(scale, member, per_row)) + _of_rows(shift, member, per_row)
    return jnp.where(inside, y, 0)
