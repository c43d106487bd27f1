"""The gradients of rows and weights in one pass over both sides, as a Pallas kernel lowered through Triton: no atomics, each row has one choice."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.permute.choices_pallas import Tokens, each_chunk
from jaxops.ops.permute.places import Places
from jaxops.ops.permute.plan import Tiles


def _combine_bwd_kernel(
    positions_ref, offsets_ref, weights_ref, dout_ref, rows_ref, drows_ref, dweights_ref, *, tile: Tiles
):
    D = rows_ref.shape[1]
    tokens = Tokens.of_program(pl.program_id(0), tile, positions_ref, offsets_ref)
    lane = min(tile.block, 16 // rows_ref.dtype.itemsize)

    def of_choices(choices, carry):
        weights = choices.load(weights_ref, choices.has_row)
        batch = choices.there.shape[0]

        def of_columns(columns, dots):
            found = columns.load(rows_ref, choices.position, choices.has_row).astype(jnp.float32)
            dout = columns.load(dout_ref, tokens.number, tokens.there).astype(jnp.float32)
            # What a thread has loaded it adds up by itself: one register a choice is kept, and the threads' sums are added once, after the last columns.
            dots = dots + jnp.sum((found * dout).reshape(batch, tile.rows, tile.block // lane, lane), axis=3)
            columns.store(drows_ref, choices.position, choices.has_row, weights * dout)
            tokens.clear(drows_ref, choices, columns)
            return dots

        dots = each_chunk(D, tile.block, of_columns, jnp.zeros((batch, tile.rows, tile.block // lane), jnp.float32))
        # Not 0 times a NaN of dout: a choice without a row has no gradient.
        choices.store(dweights_ref, jnp.where(choices.has_row, jnp.sum(dots, axis=2, keepdims=True), 0.0))
        return carry

    tokens.each_batch(of_choices, 0)


@traced_once("tile", "interpret")
def combine_bwd_pallas(
    tile: Tiles, rows: jax.Array, weights: jax.Array, dout: jax.Array, places: Places, *, interpret: bool
) -> list[jax.Array]:
    """(drows [R, D] in rows' dtype, dweights [T, k]). No size is 0."""
    return launch(
        functools.partial(_combine_bwd_kernel, tile=tile),
        places.positions,
        places.offsets,
        weights,
        dout,
        rows,
        out=[out_struct(rows.shape, rows.dtype, like=rows), out_struct(weights.shape, weights.dtype, like=rows)],
        grid=(pl.cdiv(weights.shape[0], tile.rows),),
        warps=tile.warps,
        interpret=interpret,
        name="combine_bwd",
    )
