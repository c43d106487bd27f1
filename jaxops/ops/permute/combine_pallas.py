"""The sum of the rows of each token's choices, weighted (combine) or not (permute's backward), as a Pallas kernel
lowered through Triton."""

import functools

import jax
import jax.numpy as jnp

from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.permute.choices_pallas import Tokens, launch_rows
from jaxops.ops.permute.plan import Tiles
from jaxops.ops.route import Routing


def _combine_kernel(positions_ref, offsets_ref, *refs, tile: Tiles):
    *weights_refs, rows_ref, out_ref = refs
    tokens, columns = Tokens.and_columns(rows_ref.shape[1], tile, positions_ref, offsets_ref)

    def body(choices, total):
        rows = columns.load(rows_ref, choices.position, choices.has_row).astype(jnp.float32)
        for weights_ref in weights_refs:
            rows = rows * choices.load(weights_ref, choices.has_row)
        return total + jnp.sum(rows, axis=0, keepdims=True)

    total = tokens.each_batch(body, jnp.zeros((1, tile.rows, tile.block), jnp.float32))
    columns.store(out_ref, tokens.number, tokens.exists, total)


@traced_once("tile", "out_dtype", "interpret")
def combine_pallas(tile: Tiles, rows: jax.Array, routing: Routing, out_dtype, *, interpret: bool) -> jax.Array:
    """[T, D]; without weights they are ones. No size is 0."""
    D, kernel = rows.shape[1], functools.partial(_combine_kernel, tile=tile)
    weights, name = ([], "permute_bwd") if routing.weights is None else ([routing.weights], "combine")
    out = out_struct((routing.row_positions.shape[0], D), out_dtype, like=rows)
    return launch_rows(kernel, tile, routing, *weights, rows, out=out, D=D, interpret=interpret, name=name)
