"""Parameters put together from a checkpoint's pieces on their devices, without a copy of the model on the host."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from models.hf.tensors import is_finite

SMALL = 1 << 24  # bytes of a device's part that is put together on the host, in one transfer


@functools.partial(jax.jit, donate_argnums=0, static_argnames="transposed")
def _update(part: jax.Array, piece: jax.Array, at: jax.Array, transposed: bool) -> tuple[jax.Array, jax.Array]:
    """(the new part, whether the piece is finite: on the host that would take longer than reading it)."""
    finite = jnp.all(jnp.isfinite(piece.astype(jnp.float32) if piece.dtype.itemsize == 1 else piece))
    piece = (piece.T if transposed else piece).astype(part.dtype)
    leading = part.ndim - piece.ndim
    start = [at[axis] for axis in range(leading)] + [jnp.int32(0)] * piece.ndim
    piece, dtype = piece.reshape((1,) * leading + piece.shape), part.dtype
    if dtype == jnp.bfloat16:  # as bits: XLA for CPUs converts the whole part to float32 and back
        part, piece = (lax.bitcast_convert_type(x, jnp.uint16) for x in (part, piece))
    part = lax.dynamic_update_slice(part, piece, start)
    return lax.bitcast_convert_type(part, dtype) if dtype == jnp.bfloat16 else part, finite


Bounds = tuple[tuple[int, int], ...]  # start and end along each axis


def _within(index: tuple[int, ...], bounds: Bounds) -> bool:
    return all(start <= i < end for i, (start, end) in zip(index, bounds, strict=False))


class Placed:
    """A parameter that is put together piece by piece, without a sharding on the default device."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Sharding | None):
        self.shape, self.dtype = shape, dtype
        self.sharding = sharding or SingleDeviceSharding(jax.devices()[0])
        whole = self.sharding.addressable_devices_indices_map(shape)
        self.parts: dict[Bounds, Any] = {}
        self.devices: dict[Bounds, list[Any]] = {}
        for device, slices in whole.items():
            assert slices is not None
            bounds = tuple(s.indices(size)[:2] for s, size in zip(slices, shape, strict=True))
            self.devices.setdefault(bounds, []).append(device)

    def _empty(self, bounds: Bounds) -> Any:
        shape = tuple(end - start for start, end in bounds)
        if int(np.prod(shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize <= SMALL:
            return np.empty(shape, self.dtype)
        return [jax.device_put(jnp.zeros(shape, self.dtype), device) for device in self.devices[bounds]]

    def wants(self, index: tuple[int, ...]) -> bool:
        """Whether one of this process's devices holds a part of parameter[index]."""
        return any(_within(index, bounds) for bounds in self.devices)

    def put(self, index: tuple[int, ...], piece: np.ndarray) -> tuple[list[jax.Array], list[Any]]:
        """Sets parameter[index]: (device arrays that `piece` is copied into, whether each part of it is finite)."""
        sent: list[jax.Array] = []
        finite: list[Any] = []
        for bounds, devices in self.devices.items():
            own, others = bounds[: len(index)], bounds[len(index) :]
            if not _within(index, bounds):
                continue
            at = tuple(i - start for i, (start, _) in zip(index, own, strict=True))
            found = piece[tuple(slice(*bound) for bound in others)]
            if bounds not in self.parts:
                self.parts[bounds] = self._empty(bounds)
            if isinstance(part := self.parts[bounds], np.ndarray):
                part[at] = found
                finite.append(is_finite(found))
                continue
            # Transposed on the device: a host takes longer.
            transposed = found.ndim == 2 and not found.flags.c_contiguous
            found = np.ascontiguousarray(found.T if transposed else found)
            place = np.asarray((*at, 0), np.int32)
            updates = [
                _update(a, jax.device_put(found, device), place, transposed)
                for a, device in zip(part, devices, strict=True)
            ]
            self.parts[bounds] = [new for new, _ in updates]
            sent += self.parts[bounds]
            finite.append(updates[0][1])
        return sent, finite

    def whole(self) -> jax.Array:
        """The parameter."""
        arrays = []
        for bounds, devices in self.devices.items():
            part = self.parts.pop(bounds)
            if isinstance(part, np.ndarray):
                part = [jax.device_put(part, device) for device in devices]
            arrays += part
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)
