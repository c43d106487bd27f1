"""Runs of rows from each device to each other one, whose lengths only the devices know."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.pytrees import register
from jaxops._lib.planning.costs import allocated
from jaxops._lib.ragged.offsets import group_of_rows


@register
@typing.no_type_check  # JAX unflattens pytrees with placeholders
@dataclasses.dataclass(frozen=True)
class Chunks:
    """The runs of rows of an array that this device exchanges with each device: all int32 [devices], `at` ascending.

    Attributes:
      at: where the run starts.
      sizes: its rows.
      theirs: where it starts in the other device's array.
    """

    at: jax.Array
    sizes: jax.Array
    theirs: jax.Array


def _exchange(
    axis_name: tuple[str, ...], way: str, sizes: tuple[int, int, int], operand: jax.Array, mine: Chunks, got: Chunks
) -> jax.Array:
    """Rows [R, D] of operand [S, D]: the runs `mine` of operand, which the other devices have in `got`.

    Rows outside of the runs are unspecified.

    Args:
      sizes: S, R, and how many rows a run has at most.
    """
    _, R, most = sizes
    if 0 in (R, *operand.shape):
        return vary_together(jnp.zeros((R, operand.shape[1]), operand.dtype), operand)[0]
    if way == "ragged":
        out, _ = vary_together(allocated((R, operand.shape[1]), operand.dtype), operand)
        offsets = mine.at, mine.sizes, mine.theirs, got.sizes
        return lax.ragged_all_to_all(operand, out, *offsets, axis_name=axis_name)
    if way == "mosaic":
        from jaxops.parallel.runs_mosaic import send_runs

        (name,), D = axis_name, operand.shape[1]
        wide = jnp.pad(operand, ((0, 0), (0, -D % (128 // operand.dtype.itemsize))))
        return jax.custom_batching.sequential_vmap(lambda *given: send_runs(*given, R, name))(
            wide, mine.at, mine.sizes, mine.theirs
        )[:, :D]
    row = jnp.arange(most, dtype=jnp.int32)[None, :]
    # Rows behind a run are another's: sent, as some row must be, and left out by the one that gets them.
    blocks = jnp.take(operand, mine.at[:, None] + row, axis=0, mode="clip")
    blocks = lax.all_to_all(blocks, axis_name, 0, 0)
    source = jnp.clip(group_of_rows(got.at, R), 0, got.at.size - 1)
    at = jnp.arange(R, dtype=jnp.int32) - got.at[source]
    return blocks[source, jnp.clip(at, 0, most - 1)]


def _fwd(axis_name, way, sizes, operand, mine, got):
    return exchange(axis_name, way, sizes, operand, mine, got), (mine, got)


def _bwd(axis_name, way, sizes, chunks, d):
    (S, R, most), (mine, got) = sizes, chunks
    return exchange(axis_name, way, (R, S, most), d, got, mine), None, None


exchange = differentiable(_exchange, _fwd, _bwd, static=3)
