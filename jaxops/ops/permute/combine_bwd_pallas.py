"""The gradients of rows and weights in one pass, as a Pallas kernel lowered through Triton. No atomics: a row has one
choice."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.permute.choices_pallas import Tokens, each_chunk, launch_rows
from jaxops.ops.permute.plan import Tiles
from jaxops.ops.route import Routing


def _combine_bwd_kernel(
    positions_ref, offsets_ref, weights_ref, dout_ref, rows_ref, drows_ref, dweights_ref, *, tile: Tiles
):
    D = rows_ref.shape[1]
    tokens = Tokens.of_program(pl.program_id(0), tile, positions_ref, offsets_ref)
    lane = min(tile.block, 16 // rows_ref.dtype.itemsize)

    def of_choices(choices, carry):
        weights = choices.load(weights_ref, choices.has_row)
        batch = choices.exists.shape[0]

        def of_columns(columns, dots):
            rows = columns.load(rows_ref, choices.position, choices.has_row).astype(jnp.float32)
            dout = columns.load(dout_ref, tokens.number, tokens.exists).astype(jnp.float32)
            # Each thread adds up its own loads in one register per choice; one sum over the threads follows the last
            # chunk.
            dots = dots + jnp.sum((rows * dout).reshape(batch, tile.rows, tile.block // lane, lane), axis=3)
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
    tile: Tiles, rows: jax.Array, routing: Routing, dout: jax.Array, *, interpret: bool
) -> list[jax.Array]:
    """(drows [R, D] in rows' dtype, dweights [T, k]). No size is 0."""
    weights, kernel = routing.weights, functools.partial(_combine_bwd_kernel, tile=tile)
    out = [out_struct(x.shape, x.dtype, like=rows) for x in (rows, weights)]
    operands = (weights, dout, rows)
    return launch_rows(kernel, tile, routing, *operands, out=out, D=None, interpret=interpret, name="combine_bwd")
