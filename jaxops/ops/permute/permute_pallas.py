"""Each token's row, read once and written to the rows of all its choices, as a Pallas kernel lowered through Triton.

Read by rows instead, a token would come from memory once for each choice: between its experts lie more rows than the L2 holds.
"""

import functools

import jax
from jax.experimental import pallas as pl

from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.permute.choices_pallas import Columns, Tokens
from jaxops.ops.permute.places import Places
from jaxops.ops.permute.plan import Tiles


def _permute_kernel(positions_ref, offsets_ref, x_ref, rows_ref, *, tile: Tiles):
    D = x_ref.shape[1]
    chunks = pl.cdiv(D, tile.block)
    columns = Columns.of_chunk(pl.program_id(0) % chunks, D, tile.block)
    tokens = Tokens.of_program(pl.program_id(0) // chunks, tile, positions_ref, offsets_ref)
    x = columns.load(x_ref, tokens.number, tokens.there)

    def body(choices, carry):
        columns.store(rows_ref, choices.position, choices.has_row, x)
        tokens.clear(rows_ref, choices, columns)
        return carry

    tokens.each_batch(body, 0)


@traced_once("tile", "interpret")
def permute_pallas(tile: Tiles, x: jax.Array, places: Places, *, interpret: bool) -> jax.Array:
    """[R, D] in x's dtype. No size is 0."""
    T, D = x.shape
    return launch(
        functools.partial(_permute_kernel, tile=tile),
        places.positions,
        places.offsets,
        x,
        out=out_struct((places.positions.size, D), x.dtype, like=x),
        grid=(pl.cdiv(T, tile.rows) * pl.cdiv(D, tile.block),),
        warps=tile.warps,
        interpret=interpret,
        name="permute",
    )
