"""The sum of the rows of each token's choices, weighted (combine) or not (permute's backward), as a Pallas kernel lowered through Triton."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.permute.choices_pallas import Columns, Tokens
from jaxops.ops.permute.places import Places
from jaxops.ops.permute.plan import Tiles


def _combine_kernel(*refs, tile: Tiles):
    positions_ref, offsets_ref, *weights_refs, rows_ref, out_ref = refs
    D = rows_ref.shape[1]
    chunks = pl.cdiv(D, tile.block)
    columns = Columns.of_chunk(pl.program_id(0) % chunks, D, tile.block)
    tokens = Tokens.of_program(pl.program_id(0) // chunks, tile, positions_ref, offsets_ref)

    def body(choices, total):
        found = columns.load(rows_ref, choices.position, choices.has_row).astype(jnp.float32)
        for weights_ref in weights_refs:
            found = found * choices.load(weights_ref, choices.has_row)
        return total + jnp.sum(found, axis=0, keepdims=True)

    total = tokens.each_batch(body, jnp.zeros((1, tile.rows, tile.block), jnp.float32))
    columns.store(out_ref, tokens.number, tokens.there, total)


@traced_once("tile", "out_dtype", "interpret")
def combine_pallas(
    tile: Tiles, rows: jax.Array, weights: jax.Array | None, places: Places, out_dtype, *, interpret: bool
) -> jax.Array:
    """[T, D]; without weights they are ones. No size is 0."""
    T, D = places.positions.shape[0], rows.shape[1]
    operands = [places.positions, places.offsets, *([] if weights is None else [weights]), rows]
    return launch(
        functools.partial(_combine_kernel, tile=tile),
        *operands,
        out=out_struct((T, D), out_dtype, like=rows),
        grid=(pl.cdiv(T, tile.rows) * pl.cdiv(D, tile.block),),
        warps=tile.warps,
        interpret=interpret,
        name="permute_bwd" if weights is None else "combine",
    )
