"""Embeddings whose gradient is a product over sorted words.

The gradient that JAX derives adds each token's row to its word's with atomics, in the rows' dtype: in bfloat16, rounded
after each of a frequent word's tokens, in an order that differs from run to run, and slowly, since tokens of one word
wait for each other. In a step of the 3b preset on text as bytes that took 6 to 22 ms (H200, 2026-11-24).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jaxops

WORDS = 128  # of a group of the product


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def look_up(table: jax.Array, words: jax.Array, dtype: Any, backend: str) -> jax.Array:
    """table[words], [..., width], rounded to dtype; NaN where there is no such word.

    Bfloat16 is rounded by an operation of its own, since XLA for GPUs leaves out a cast to it and back: over a mesh,
    where the table is gathered in bfloat16, the first loss of the 3b preset was 4e-4 higher than on one device (two
    H200s, 2026-11-25).

    The gradient of the table [vocab, width] is summed in float32, in an order that depends only on the words, by a
    backend of `jaxops.grouped_wgrad`.
    """
    rows = table.at[words].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    if jnp.dtype(dtype) == jnp.bfloat16:
        rows = jax.lax.reduce_precision(rows, exponent_bits=8, mantissa_bits=7)
    return rows.astype(dtype)


def _fwd(table: jax.Array, words: jax.Array, dtype: Any, backend: str) -> tuple[jax.Array, Any]:
    # An empty array has the table's size, dtype and mesh axes, and no memory.
    return look_up(table, words, dtype, backend), (words, table[:, :0])


def _bwd(dtype: Any, backend: str, residuals: Any, dout: jax.Array) -> tuple[jax.Array, None]:
    """Of the tokens sorted by word, a group has those of WORDS words; its product with their one-hot rows is the
    gradient of these words' rows."""
    words, empty = residuals
    count = empty.shape[0]
    order = jnp.argsort(words.ravel())
    sorted_words, rows = words.ravel()[order], dout.reshape(-1, dout.shape[-1])[order]
    firsts = jnp.arange(-(-count // WORDS) + 1, dtype=jnp.int32) * WORDS
    offsets = jnp.searchsorted(sorted_words, firsts, method="compare_all").astype(jnp.int32)
    chosen = jax.nn.one_hot(sorted_words % WORDS, WORDS, dtype=rows.dtype)
    grad = jaxops.grouped_wgrad(
        chosen, rows, offsets, precision=jax.lax.Precision.HIGHEST, out_dtype=empty.dtype, backend=backend
    )
    return grad.reshape(-1, rows.shape[1])[:count], None


look_up.defvjp(_fwd, _bwd)
