"""Tiles of ragged rows and their order, from device-side offsets: for the kernels and the xla backend."""

import jax
import jax.numpy as jnp


def tile_bound(M: int, G: int, bm: int) -> int:
    """The most row tiles for any offsets: each group, and each run of rows outside, may end in a partial tile, and each
    tile has a row. An M that is a symbol (`jax.export`) is not compared."""
    bound = -(-M // bm) + G + 1
    return min(M, bound) if isinstance(M, int) else bound


def row_tiles(t: jax.Array, lo: jax.Array, hi: jax.Array, G: int, bm: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group, first row and end of row tiles t[T] of the runs lo[R], hi[R], by a comparison with the running tile count.

    Tiles are numbered run by run and never cross runs. A tile outside the groups has group G; a number past the last
    tile has group G and no rows.
    """
    count = (hi - lo + bm - 1) // bm
    after = jnp.cumsum(count, dtype=jnp.int32)
    first = after - count
    mine = (first[None, :] <= t[:, None]) & (t[:, None] < after[None, :])  # [T, R], at most one True a row

    def pick(x):
        return jnp.sum(jnp.where(mine, x, 0), axis=1, dtype=jnp.int32)

    run = jnp.arange(lo.shape[0], dtype=jnp.int32)
    group = jnp.where((run >= 1) & (run <= G), run - 1, G)
    start = pick(lo[None, :] + (t[:, None] - first[None, :]) * bm)
    return pick(group[None, :] - G) + G, start, jnp.minimum(start + bm, pick(hi[None, :]))


def panel_order(pid: jax.Array, num_i: int, num_j: int, panel: int) -> tuple[jax.Array, jax.Array]:
    """Tile (i, j) of program pid: column by column in panels of `panel` rows of tiles, so that neighbours share L2."""
    first = pid // (panel * num_j) * panel
    height = jnp.minimum(num_i - first, panel)
    inside = pid % (panel * num_j)
    return first + inside % height, inside // height
