"""Runs of rows from each device to each other one, whose lengths only the devices know."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.pytrees import register
from jaxops._lib.planning.device import current_device
from jaxops.parallel.device_numbers import if_devices_in_order
from jaxops.parallel.plan import make_exchange_plan, reach_of

Rows = tuple[jax.Array, ...]


@register
@typing.no_type_check  # JAX unflattens pytrees with placeholders
@dataclasses.dataclass(frozen=True)
class Runs:
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
    axes: tuple[str, ...], backend: str, sizes: tuple[int, int, int], operands: Rows, mine: Runs, got: Runs
) -> Rows:
    """Rows [R, D] of each operand [S, D]: the runs `mine` of it, which the other devices have in `got`.

    Rows outside of the runs are unspecified.

    Args:
      sizes: S, R, and how many rows a run has at most.
    """
    if 0 in (*sizes, *(x.shape[1] for x in operands)):
        empty = (jnp.zeros((sizes[1], x.shape[1]), x.dtype) for x in operands)
        return tuple(vary_together(x, operands[0])[0] for x in empty)
    plain = functools.partial(_padded, axes, sizes)
    row_bytes = sum(-(-x.shape[1] * x.dtype.itemsize // 128) * 128 for x in operands)
    plan = make_exchange_plan(reach_of(axes), current_device(), row_bytes=row_bytes, backend=backend)
    if plan.backend == "padded":
        return plain(operands, mine, got)
    call = functools.partial(_in_kernel, axes, sizes[1])
    call = call if backend == "mosaic" else functools.partial(if_devices_in_order, call, plain)
    # vmap in a loop, for the programs of a batch would share one counter.
    return jax.custom_batching.sequential_vmap(call)(operands, mine, got)


def _in_kernel(axes: tuple[str, ...], R: int, operands: Rows, mine: Runs, _: Runs) -> Rows:
    from jaxops.parallel.runs_mosaic import send_runs

    return send_runs(operands, mine.at, mine.sizes, mine.theirs, R, axes)


def _padded(axes: tuple[str, ...], sizes: tuple[int, int, int], operands: Rows, mine: Runs, got: Runs) -> Rows:
    _, R, most = sizes
    row, column = jnp.arange(R, dtype=jnp.int32), jnp.arange(most, dtype=jnp.int32)[None, :]
    # Not `jnp.searchsorted`, which `if_devices_in_order` cannot have inside (JAX 0.12).
    source = jnp.maximum(jnp.sum(got.at[None, :] <= row[:, None], axis=1, dtype=jnp.int32) - 1, 0)
    at = jnp.clip(row - got.at[source], 0, most - 1)

    def sent(x: jax.Array) -> jax.Array:
        # Rows behind a run are another's: sent, as some row must be, and left out by the one that gets them.
        blocks = jnp.take(x, mine.at[:, None] + column, axis=0, mode="clip")
        return lax.all_to_all(blocks, axes, 0, 0)[source, at]

    return tuple(map(sent, operands))


def _fwd(axes, backend, sizes, operands, mine, got):
    return exchange(axes, backend, sizes, operands, mine, got), (mine, got)


def _bwd(axes, backend, sizes, runs, d):
    (S, R, most), (mine, got) = sizes, runs
    return exchange(axes, backend, (R, S, most), d, got, mine), None, None


exchange = differentiable(_exchange, _fwd, _bwd, static=3)
