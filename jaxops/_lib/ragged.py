"""Where the runs of ragged rows lie, from device-side offsets: shared by every op over ragged rows, in kernels and in XLA."""

import jax
import jax.numpy as jnp


def runs(offsets_at, r: jax.Array, G: int, M: int) -> tuple[jax.Array, jax.Array]:
    """First row and end of run r: run 0 lies before the groups, run 1 + g is group g, run G + 1 lies after them, later runs are empty.

    Bounds are clipped to [0, M]: offsets that break the contract give wrong rows, never an access out of bounds.

    Args:
      offsets_at: a function from int32 indices in [0, G] to those offsets.
      r: int32 indices of runs.
    """
    lo = jnp.where(r == 0, 0, jnp.where(r <= G + 1, offsets_at(jnp.clip(r - 1, 0, G)), M))
    hi = jnp.where(r <= G, offsets_at(jnp.clip(r, 0, G)), M)
    lo = jnp.clip(lo, 0, M)
    return lo, jnp.clip(hi, lo, M)
