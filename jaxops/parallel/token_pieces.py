"""Tokens to the experts of other devices and results back, in pieces: one is sent while the experts multiply another.

A device's collectives run one after another. XLA's scheduler places work beside one of several that could start
together, and beside none of the others: so each waits for the one before, in the forward and in the backward.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.manual_axes import barrier

Axis = str | tuple[str, ...]


def gather_pieces(pieces: Sequence[jax.Array], axis_name: Axis) -> tuple[jax.Array, ...]:
    """All devices' rows of each piece [T_i, ...], in the devices' order, sent in its dtype.

    The gradients are summed in their dtype as they are sent back, in the same order.
    """
    return _gather(axis_name, tuple(pieces))


def add_own_rows(pieces: Sequence[jax.Array], axis_name: Axis) -> tuple[jax.Array, ...]:
    """The sums over the devices of own rows of each piece [devices * T_i, D]: sent in its dtype, added in float32."""
    return _add(axis_name, tuple(pieces))


def _in_turn(collective, pieces: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """collective(piece) of each, which starts when that of the piece before is done."""
    found: list[jax.Array] = []
    for piece in pieces:
        if found:
            found[-1], piece = barrier((found[-1], piece))
        found.append(collective(piece))
    return tuple(found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(axis_name: Axis, pieces: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return _in_turn(functools.partial(lax.all_gather, axis_name=axis_name, tiled=True), pieces)


def _gather_bwd(axis_name: Axis, _: None, dpieces: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...]]:
    return (_in_turn(functools.partial(lax.psum_scatter, axis_name=axis_name, tiled=True), dpieces),)


_gather.defvjp(lambda axis_name, pieces: (_gather(axis_name, pieces), None), _gather_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add(axis_name: Axis, pieces: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    def own(y: jax.Array) -> jax.Array:
        parts = lax.all_to_all(y.reshape(lax.axis_size(axis_name), -1, *y.shape[1:]), axis_name, 0, 0)
        return jnp.sum(parts.astype(jnp.float32), axis=0).astype(y.dtype)

    return _in_turn(own, pieces)


# JAX's transpose of the exchange would write the cotangent once for each device before it sends it.
_add.defvjp(
    lambda axis_name, pieces: (_add(axis_name, pieces), None),
    lambda axis_name, _, dpieces: (_gather(axis_name, dpieces),),
)
