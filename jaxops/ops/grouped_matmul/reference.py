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


def ragged_dot_general_reference(lhs, rhs, group_sizes, numbers, group_offset=None) -> jax.Array:
    """In float32; arguments as `jaxops.ragged_dot_general`. One einsum, with the rows of each group as ones."""
    (left, right), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged,), groups, letters = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions, iter("abcdefhijklmnop")
    of_lhs = [next(letters) for _ in lhs.shape]
    shared = dict(zip((*right, *rhs_batch), (of_lhs[axis] for axis in (*left, *lhs_batch)), strict=True))
    of_rhs = ["g" if axis in groups else shared.get(axis) or next(letters) for axis in range(rhs.ndim)]
    rest = [axis for axis in range(lhs.ndim) if axis not in (*left, *lhs_batch)]
    out = "".join(of_lhs[axis] for axis in (*lhs_batch, *rest))
    out += "".join(of_rhs[axis] for axis in range(rhs.ndim) if axis not in (*shared, *groups))
    terms, operands = ["".join(of_lhs), "".join(of_rhs)], [lhs.astype(jnp.float32), rhs.astype(jnp.float32)]
    if ragged not in lhs_batch:
        kind = rest if ragged in rest else left
        prefix = [*lhs_batch, *kind[: kind.index(ragged)]]
        shape = *(lhs.shape[axis] for axis in prefix), group_sizes.shape[-1]
        ends = jnp.cumsum(jnp.broadcast_to(group_sizes, shape), axis=-1)
        ends = jnp.concatenate([0 * ends[..., :1], ends], axis=-1)
        if group_offset is not None:
            first = group_offset + jnp.arange(rhs.shape[groups[0]] + 1)
            ends = ends[..., jnp.clip(first, 0, ends.shape[-1] - 1)]
        row = jnp.arange(lhs.shape[ragged]).reshape([1] * ends.ndim + [-1])
        own = (ends[..., :-1, None] <= row) & (row < ends[..., 1:, None])
        terms.append("".join(of_lhs[axis] for axis in prefix) + "g" + of_lhs[ragged])
        operands.append(own.astype(jnp.float32))
    out = out if ragged not in left else "g" + out
    return jnp.einsum(f"{','.join(terms)}->{out}", *operands, precision="highest")
