"""Each token's row, read once and written to the rows of all its choices, as a Pallas kernel lowered through Triton.

A kernel over rows would read a token from memory once per choice: the rows between its experts do not fit in the L2.
"""

import functools

import jax

from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.permute.choices_pallas import Tokens, launch_rows
from jaxops.ops.permute.plan import Tiles
from jaxops.ops.route import Routing


def _permute_kernel(positions_ref, offsets_ref, x_ref, rows_ref, *, tile: Tiles):
    tokens, columns = Tokens.and_columns(x_ref.shape[1], tile, positions_ref, offsets_ref)
    x = columns.load(x_ref, tokens.number, tokens.exists)

    def body(choices, carry):
        columns.store(rows_ref, choices.position, choices.has_row, x)
        tokens.clear(rows_ref, choices, columns)
        return carry

    tokens.each_batch(body, 0)


@traced_once("tile", "interpret")
def permute_pallas(tile: Tiles, x: jax.Array, routing: Routing, *, interpret: bool) -> jax.Array:
    """[R, D] in x's dtype. No size is 0."""
    D, kernel = x.shape[1], functools.partial(_permute_kernel, tile=tile)
    out = out_struct((routing.row_positions.size, D), x.dtype, like=x)
    return launch_rows(kernel, tile, routing, x, out=out, D=D, interpret=interpret, name="permute")
