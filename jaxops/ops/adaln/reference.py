"""What the ops mean, in float32 and plain jnp; their gradients are JAX autodiff's. For tests: it holds a [T, B] matrix in memory."""

import jax
import jax.numpy as jnp

from jaxops._lib.activations import activate


def _rows_of_sequences(offsets: jax.Array, T: int) -> jax.Array:
    """[T, B] float32: 1 where a row is a sequence's."""
    row = jnp.arange(T)[:, None]
    return ((offsets[None, :-1] <= row) & (row < offsets[None, 1:])).astype(jnp.float32)


def _of_rows(values: jax.Array, mine: jax.Array | None) -> jax.Array:
    """Each row's own vector [T, D]."""
    values = values.astype(jnp.float32)
    return values if mine is None else jnp.matmul(mine, values, precision="highest")


def gated_residual_reference(residual, h, gate, sequence_offsets, *, per_row=False) -> jax.Array:
    """float32 [T, D]; arguments as `jaxops.gated_residual`; per_row says that gate has a vector for every row."""
    mine = _rows_of_sequences(sequence_offsets, residual.shape[0])
    inside = jnp.sum(mine, axis=1, keepdims=True) > 0
    update = _of_rows(gate, None if per_row else mine) * jnp.where(inside, h.astype(jnp.float32), 0)
    return residual.astype(jnp.float32) + jnp.where(inside, update, 0)


def adaln_reference(
    x,
    scale,
    shift,
    sequence_offsets,
    *,
    norm="layer",
    weight=None,
    bias=None,
    epsilon=1e-6,
    activation=None,
    per_row=False,
) -> jax.Array:
    """float32 [T, D]; arguments as `jaxops.adaln`; per_row says that scale and shift have a vector for every row."""
    mine = _rows_of_sequences(sequence_offsets, x.shape[0])
    inside = jnp.sum(mine, axis=1, keepdims=True) > 0
    x = jnp.where(inside, x.astype(jnp.float32), 0)
    if norm == "layer":
        x = x - jnp.mean(x, axis=1, keepdims=True)
    y = x * jax.lax.rsqrt(jnp.mean(x**2, axis=1, keepdims=True) + epsilon)
    if weight is not None:
        y = y * weight.astype(jnp.float32)[None, :]
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :]
    y = activate(y, activation)
    y = y * (1 + _of_rows(scale, None if per_row else mine)) + _of_rows(shift, None if per_row else mine)
    return jnp.where(inside, y, 0)
