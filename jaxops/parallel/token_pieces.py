"""Tokens to the experts of other devices and results back, in pieces: one is sent while the experts multiply another.

Each collective waits for the one before it, in the forward and in the backward. Of several that could start together
XLA's scheduler hides one behind work and leaves the others exposed.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.manual_axes import barrier
from jaxops.parallel.exchange import Axis, gather_parts, sum_parts

Pieces = tuple[jax.Array, ...]


def gather_pieces(pieces: Sequence[jax.Array], axis_name: Axis) -> Pieces:
    """All devices' rows of each piece [T_i, ...], in the devices' order, sent in its dtype.

    The gradients are sent back in their dtype and added in float32, in the same order.
    """
    return _gather(axis_name, tuple(pieces))


def add_own_rows(pieces: Sequence[jax.Array], axis_name: Axis) -> Pieces:
    """The sums over the devices of own rows of each piece [devices * T_i, D]: sent in its dtype, added in float32."""
    return _add(axis_name, tuple(pieces))


def _in_turn(collective: Callable[[jax.Array], jax.Array], pieces: Pieces) -> Pieces:
    """collective(piece) of each, which starts when that of the piece before is done."""
    results: list[jax.Array] = []
    for piece in pieces:
        if results:
            results[-1], piece = barrier((results[-1], piece))
        results.append(collective(piece))
    return tuple(results)


def _gather_forward(axis_name: Axis, pieces: Pieces) -> Pieces:
    return _in_turn(lambda piece: gather_parts(piece, axis_name), pieces)


def _gather_bwd(axis_name: Axis, _: None, dpieces: Pieces) -> tuple[Pieces]:
    return (_in_turn(functools.partial(_sum, axis_name), dpieces),)


def _add_forward(axis_name: Axis, pieces: Pieces) -> Pieces:
    return _in_turn(functools.partial(_sum, axis_name), pieces)


def _sum(axis_name: Axis, piece: jax.Array) -> jax.Array:
    return sum_parts(piece, axis_name, dtype=jnp.float32).astype(piece.dtype)


def _add_bwd(axis_name: Axis, _: None, dpieces: Pieces) -> tuple[Pieces]:
    """JAX's transpose of the exchange would write the cotangent once for each device before it sends it."""
    return (_gather(axis_name, dpieces),)


_gather = differentiable(_gather_forward, lambda *given: (_gather(*given), None), _gather_bwd, static=1)
_add = differentiable(_add_forward, lambda *given: (_add(*given), None), _add_bwd, static=1)
