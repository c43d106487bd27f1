"""All-gather and reduce-scatter by `lax.ppermute`: each device sends each other device its part.

Over the GPUs of one process the cards' copy engines can send the parts: XLA's option `xla_gpu_collective_permute_mode`
is then COLLECTIVES_PEER_MEMORY. NCCL sends them by kernels, which need multiprocessors. Such a kernel waits for one of
ours that holds all multiprocessors, and leaves fewer to one that starts later.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxops._lib.planning.costs import allocated

Axis = str | tuple[str, ...]


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
