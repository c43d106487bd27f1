"""Where rows lie: what the ops read of a Routing, beside its weights."""

from typing import NamedTuple

import jax


class Places(NamedTuple):
    """R = T * k rows. Those from offsets[0] to offsets[-1] - 1 belong to the choices whose positions say so; the others to none.

    Attributes:
      positions: [T, k] int32, the row of each choice.
      indices: [R] int32, the token of each row: the same told the other way round.
      offsets: [G + 1] int32.
    """

    positions: jax.Array
    indices: jax.Array
    offsets: jax.Array
