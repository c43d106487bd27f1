"""Both passes of the backward on Hopper, and the numbers of each query row that they share."""

import jax
import jax.numpy as jnp

from jaxops.ops.packed_attention.dkv_triton import gradients_of_keys
from jaxops.ops.packed_attention.dq_triton import gradient_of_q
from jaxops.ops.packed_attention.plan import Arrays, Spec, Tiles
from jaxops.ops.packed_attention.xla import along_rows


def backward_triton(
    spec: Spec, dq: Tiles, dkv: Tiles, arrays: Arrays, out: jax.Array, lse: jax.Array, dout: jax.Array, *, cores: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv in the dtypes of q, k and v. out and lse are the forward's. No size is 0."""
    numbers = row_numbers(arrays, out, lse, dout)
    return (
        gradient_of_q(spec, dq, arrays, *numbers, dout, cores=cores),
        *gradients_of_keys(spec, dkv, arrays, *numbers, dout, cores=cores),
    )


def row_numbers(arrays: Arrays, out: jax.Array, lse: jax.Array, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 [N, T]: lse, infinite in rows that see nothing, whose probabilities are then zero; and `along_rows`."""
    sees = (arrays.first < arrays.end)[None, :]
    return jnp.where(sees, lse, jnp.inf), along_rows(arrays, out, dout)
