"""Where ragged rows lie, from device-side offsets: for every op over ragged rows, in kernels and in XLA."""

import jax
import jax.numpy as jnp

from jaxops._lib.numerics.fp8 import BLOCK


def runs(offsets_at, r: jax.Array, G: int, M: int) -> tuple[jax.Array, jax.Array]:
    """First row and end of run r: 0 is the rows before the groups, 1 + g is group g, G + 1 the rows after; others are
    empty.

    Bounds are clipped to [0, M]: offsets that break the contract give wrong rows, never an access out of bounds.

    Args:
      offsets_at: a function from int32 indices in [0, G] to those offsets.
      r: int32 indices of runs.
    """
    lo = jnp.where(r == 0, 0, jnp.where(r <= G + 1, offsets_at(jnp.clip(r - 1, 0, G)), M))
    hi = jnp.where(r <= G, offsets_at(jnp.clip(r, 0, G)), M)
    lo = jnp.clip(lo, 0, M)
    return lo, jnp.clip(hi, lo, M)


def clip_bounds(first: jax.Array, end: jax.Array, R: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last offset, clipped to [0, R] and into order."""
    lo = jnp.clip(first, 0, R)
    return lo, jnp.clip(end, lo, R)


def group_of_rows(offsets: jax.Array, M: int) -> jax.Array:
    """int32 [M]: each row's group; -1 before the first one, G or more after the last one."""
    return jnp.searchsorted(offsets, jnp.arange(M, dtype=jnp.int32), side="right").astype(jnp.int32) - 1


def padded_rows(M: int, G: int) -> int:
    """Rows that hold M ragged rows in G groups, each padded to a multiple of 128, whatever the offsets."""
    return BLOCK * (-(-M // BLOCK) + G)


def padded_starts(group_offsets: jax.Array, M: int) -> jax.Array:
    """[G + 1] int32: where each group starts when all are padded to multiples of 128, then where the last one ends."""
    G = group_offsets.shape[0] - 1
    lo, hi = runs(lambda i: group_offsets[i], jnp.arange(1, G + 1, dtype=jnp.int32), G, M)
    ends = BLOCK * jnp.cumsum((hi - lo + BLOCK - 1) // BLOCK, dtype=jnp.int32)
    return jnp.minimum(jnp.concatenate([jnp.zeros(1, jnp.int32), ends]), padded_rows(M, G))
