"""Every mask of the op as one run of key rows for each query row: all that the backends need to know of it."""

import jax
import jax.numpy as jnp

from jaxops._lib.ragged import clip_bounds

_FEW = 1024  # offsets that all rows are compared with at once; a search in more is a loop


def visible_rows(
    offsets: jax.Array,
    kv_offsets: jax.Array | None,
    visible_until: jax.Array | None,
    *,
    T: int,
    S: int,
    causal: bool,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which key rows each query row sees.

    The runs lie within the row's own sequence and within 0 to S, whatever the values of the operands are.

    Returns:
      (first [T], end [T]: row t sees key rows first[t] to end[t] - 1, 0 and 0 if it sees none; keys [2]: where the
      first sequence of keys starts, and where the last one ends). int32.
    """
    B = offsets.shape[0] - 1
    row = jnp.arange(T, dtype=jnp.int32)
    method = "compare_all" if B < _FEW else "scan"
    sequence = jnp.searchsorted(offsets, row, side="right", method=method).astype(jnp.int32) - 1
    inside, sequence = (sequence >= 0) & (sequence < B), jnp.clip(sequence, 0, B - 1)
    keys = offsets if kv_offsets is None else kv_offsets
    start, stop = clip_bounds(keys[sequence], keys[sequence + 1], S)
    # The key row that counts as the query row's own: sequences of queries and keys end together.
    own = row if kv_offsets is None else stop - jnp.clip(offsets[sequence + 1], 0, T) + row
    first, end = start, stop
    if causal:
        end = own + 1
    if visible_until is not None:
        end = visible_until
    if window is not None:
        first = own - min(window, S)
        if not causal and visible_until is None:
            end = own + min(window, S) + 1
    first, end = jnp.clip(first, start, stop), jnp.clip(end, start, stop)
    sees = inside & (first < end)
    return (
        jnp.where(sees, first, 0),
        jnp.where(sees, end, 0),
        jnp.stack(clip_bounds(keys[0], keys[-1], S)),
    )
