"""Every mask of the op as one run of key rows for each query row: all that the backends need to know of it."""

import functools

import jax
import jax.numpy as jnp

from jaxops._lib.arrays.symbolic import is_symbolic, least
from jaxops._lib.ragged.offsets import clip_bounds

_FEW = 1024  # offsets that all rows are compared with at once; a search in more is a loop


@functools.partial(jax.jit, static_argnames=("T", "S", "causal", "window"), inline=True)
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
      (first [T], end [T]: row t sees key rows first[t] to end[t] - 1, 0 and 0 if it sees none; inside [4]: where the
      first sequence of queries starts, where the last one ends, and the same of keys). int32.
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
        reach = least(min(window, 2**30) if is_symbolic(S) else window, S)  # row numbers stay in the range of int32
        first = own - reach
        if not causal and visible_until is None:
            end = own + reach + 1
    first, end = jnp.clip(first, start, stop), jnp.clip(end, start, stop)
    sees = inside & (first < end)
    return (
        jnp.where(sees, first, 0),
        jnp.where(sees, end, 0),
        jnp.stack([*clip_bounds(offsets[0], offsets[-1], T), *clip_bounds(keys[0], keys[-1], S)]),
    )


def blocks_that_see(first: jax.Array, end: jax.Array, *, S: int, bq: int, bk: int) -> jax.Array:
    """int32 [2, cdiv(S, bk)]: of each block of keys, the first block of queries with a row that may see one of them,
    and the end of the last such block; 0 and 0 for none. first and end are of `visible_rows`."""
    T = first.shape[0]
    first, end = (jnp.pad(x, (0, -T % bq)).reshape(-1, bq) for x in (first, end))
    least, most = jnp.min(jnp.where(first < end, first, S), axis=1), jnp.max(end, axis=1)
    start, number = jnp.arange(0, S, bk, dtype=jnp.int32), jnp.arange(first.shape[0], dtype=jnp.int32)
    sees = (least[None, :] < start[:, None] + bk) & (most[None, :] > start[:, None])
    stop = jnp.max(jnp.where(sees, number[None, :] + 1, 0), axis=1)
    return jnp.stack([jnp.min(jnp.where(sees, number[None, :], stop[:, None]), axis=1), stop])


CONSUMER_ROWS = 64  # of a warp group's wgmma
FIELDS = 5  # of a row of `query_blocks` and of `key_blocks`


def query_blocks(first: jax.Array, end: jax.Array, *, S: int, bq: int, bk: int) -> jax.Array:
    """int32 [cdiv(T, bq), FIELDS]: the blocks of query rows, those with the most keys first, each with its first row,
    the first key that one of its rows sees and the end of the last one (0 and 0 for none), and of its tiles of bk keys,
    counted from there: how many at the right, and how many in all, some row does not see whole."""
    T = first.shape[0]
    first, end = (jnp.pad(x, (0, -T % bq)).reshape(-1, bq) for x in (first, end))
    sees = first < end
    least, most = jnp.min(jnp.where(sees, first, S), axis=1), jnp.max(end, axis=1)
    least = jnp.minimum(least, most)
    tiles = jnp.maximum((most - least + bk - 1) // bk, 1)
    left = jnp.max(jnp.where(sees, first, 0), axis=1) - least
    left = jnp.clip((left + bk - 1) // bk, 0, tiles)
    whole = jnp.clip((jnp.min(jnp.where(sees, end, S), axis=1) - least) // bk, left, tiles)
    row = bq * jnp.arange(first.shape[0], dtype=jnp.int32)
    blocks = jnp.stack([row, least, most, tiles - whole, tiles - whole + left], axis=1)
    return blocks[jnp.argsort(-tiles)]


def key_blocks(first: jax.Array, end: jax.Array, *, S: int, bq: int, bk: int) -> jax.Array:
    """int32 [cdiv(S, bk), FIELDS]: the blocks of bk key rows, those that the most queries see first, each with its
    first row, and of the tiles of bq queries with a row that sees some of it: the first one's number, how many at the
    left and at the right have a row that does not see it whole, and how many they are."""
    T = first.shape[0]
    first, end = (jnp.pad(x, (0, -T % bq)).reshape(-1, bq) for x in (first, end))
    seen = blocks_that_see(first.ravel(), end.ravel(), S=S, bq=bq, bk=bk)
    row, number = jnp.arange(0, S, bk, dtype=jnp.int32), jnp.arange(first.shape[0], dtype=jnp.int32)
    # A row that sees nothing, or is padding, sees no block whole.
    most, least = jnp.max(first, axis=1)[None, :], jnp.min(end, axis=1)[None, :]
    whole = (most <= row[:, None]) & (least >= row[:, None] + bk)
    start, stop = seen
    number = number[None, :]
    begin = jnp.min(jnp.where(whole, number, stop[:, None]), axis=1)
    last = jnp.min(jnp.where(whole | (number < begin[:, None]), stop[:, None], number), axis=1)
    last = jnp.maximum(last, begin)
    blocks = jnp.stack([row, start, begin - start, stop - last, stop - start], axis=1)
    return blocks[jnp.argsort(start - stop)]


def most_pairs(*, T: int, S: int, causal: bool, window: int | None, free: bool, longest: int | None) -> int:
    """Pairs of a query and a key that it sees, at the most: one sequence of all rows, or as many as there can be of the
    longest. free: visible_until says where runs end. 0 for symbolic sizes, of which no kernel is launched."""
    if is_symbolic(T) or is_symbolic(S):
        return 0
    keys = S if longest is None else min(S, longest)
    behind = keys if window is None else min(keys, window + 1)
    if causal:
        return T * (keys + 1) // 2 if window is None and S == T else T * behind
    return T * (keys if free or window is None else min(keys, 2 * window + 1))
