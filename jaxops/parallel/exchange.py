"""All-gather and reduce-scatter by `lax.ppermute`: each device sends each other device its part.

Where `peer_memory_missing` finds nothing, the cards' copy engines can send the parts: XLA's option
`xla_gpu_collective_permute_mode` is then COLLECTIVES_PEER_MEMORY. NCCL sends them by kernels, which need
multiprocessors. Such a kernel waits for one of ours that holds all multiprocessors, and leaves fewer to one that starts
later.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.manual_axes import barrier
from jaxops._lib.planning.costs import allocated

Axis = str | tuple[str, ...]
Pieces = tuple[jax.Array, ...]


@jax.named_call
def gather_parts(x: jax.Array, axis_name: Axis, axis: int = 0) -> jax.Array:
    """All devices' x along `axis`, in the devices' order."""
    devices, size = lax.axis_size(axis_name), x.shape[axis]
    if devices == 1:
        return x
    shape = (*x.shape[:axis], devices * size, *x.shape[axis + 1 :])
    whole = allocated(shape, x.dtype)
    for part, device in [(x, lax.axis_index(axis_name)), *((send(x), source) for send, _, source in _rings(axis_name))]:
        whole = lax.dynamic_update_slice_in_dim(whole, part, device * size, axis)
    return whole


@jax.named_call
def sum_parts(x: jax.Array, axis_name: Axis, axis: int = 0, *, dtype: DTypeLike) -> jax.Array:
    """This device's part along `axis` of the sum of all devices' x, sent in x's dtype and added up in dtype."""
    size = x.shape[axis] // lax.axis_size(axis_name)
    part = lambda device: lax.dynamic_slice_in_dim(x, device * size, size, axis)
    total = part(lax.axis_index(axis_name)).astype(dtype)
    for send, target, _ in _rings(axis_name):
        total += send(part(target)).astype(dtype)
    return total


def _rings(axis_name: Axis) -> Iterator[tuple[Callable[[jax.Array], jax.Array], jax.Array, jax.Array]]:
    """For each step around the ring: a function that sends an array that many devices on, the device that this one
    sends to, and the device that it receives from."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    devices, own = lax.axis_size(names), lax.axis_index(names)
    # ppermute wants the mesh's order of the axes, and counts devices in it.
    ordered = tuple(sorted(names, key=jax.sharding.get_abstract_mesh().axis_names.index))
    numbers = np.arange(devices).reshape([lax.axis_size(name) for name in ordered])
    numbers = numbers.transpose([ordered.index(name) for name in names]).ravel().tolist()
    for step in range(1, devices):
        ring = [(numbers[device], numbers[(device + step) % devices]) for device in range(devices)]
        send = functools.partial(lax.ppermute, axis_name=ordered, perm=ring)
        yield send, (own + step) % devices, (own - step) % devices


# Tokens to the experts of other devices and results back, several arrays, one collective after another.
# Each collective waits for the one before it, in the forward and in the backward: of several that could start together
# XLA's scheduler hides one behind work and leaves the others exposed.


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
