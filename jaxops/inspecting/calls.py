"""A call of an op, taken apart: its arrays by name, and what is static."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxops._lib.planning.device import default_device
from jaxops.inspecting.references import COLLECTIVES, ENTRIES, Entry, is_float
from jaxops.ops.quantize import Quantized


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array that was passed.

    Attributes:
      name: from the op's signature; of a part of a tree with its path, as "routing.weights" or "rhs[0]".
      device: the vendor's name of the device and its number.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Call:
    """A call whose arrays are apart from the rest.

    Attributes:
      op, entry: what is called, and how it is examined.
      static: what was passed and holds no array, by name.
      names, arrays: of all arrays that were passed, in the signature's order.
      trees: of each parameter, its structure and its leaves; where a leaf is an array, a `_Slot`.
      device: JAX's device that it runs on.
    """

    op: Callable
    entry: Entry
    static: dict[str, Any]
    names: tuple[str, ...]
    arrays: tuple[jax.Array, ...]
    trees: dict[str, tuple[Any, list[Any]]]
    device: Any

    @property
    def name(self) -> str:
        return self.op.__name__

    def parameters(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """The op's parameters by name, defaults too, with these arrays in place of those that were passed."""
        return {
            name: jax.tree.unflatten(tree, [arrays[x.number] if isinstance(x, _Slot) else x for x in leaves])
            for name, (tree, leaves) in self.trees.items()
        }

    def run(self, arrays: Sequence[Any]) -> Any:
        return self.op(**self.parameters(arrays))

    @functools.cached_property
    def differentiable(self) -> dict[int, str]:
        """Numbers and names of the arrays that have gradients."""
        given = self.parameters(self.arrays)
        quantized = {name for name, value in given.items() if isinstance(value, Quantized)}
        return {
            i: name
            for i, (name, x) in enumerate(zip(self.names, self.arrays, strict=True))
            if is_float(x) and root_of(name) not in quantized
            if any(name == known or root_of(name) == known for known in self.entry.wrt)
        }

    def split(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """(those that have gradients, the others)"""
        held = self.differentiable
        return [x for i, x in enumerate(arrays) if i in held], [x for i, x in enumerate(arrays) if i not in held]

    def join(self, held: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """The arrays of which `split` made these."""
        first, second = iter(held), iter(others)
        numbers = self.differentiable
        return [next(first if i in numbers else second) for i in range(len(self.arrays))]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        found = []
        for name, x in zip(self.names, self.arrays, strict=True):
            (device,) = x.devices()
            found.append(Argument(name, tuple(x.shape), str(x.dtype), f"{device.device_kind}:{device.id}", x.nbytes))
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The place of an array."""

    number: int


def root_of(name: str) -> str:
    """The parameter of a name: "routing" of "routing.weights"."""
    return name.replace("[", ".").partition(".")[0]


def entry_of(op: Any) -> Entry:
    """
    Raises:
      TypeError: not an op.
      NotImplementedError: one that runs across devices.
    """
    try:
        if op in COLLECTIVES:
            raise NotImplementedError(
                f"jaxops.{op.__name__} runs inside jax.shard_map, on all devices of a mesh axis; inspect examines a "
                "call on one device. Time the jitted shard_map with jaxops.profiling.device_times_us, and compare it "
                f"with {COLLECTIVES[op]} of the whole arrays."
            )
        return ENTRIES[op]
    except (KeyError, TypeError):  # TypeError: not hashable
        known = ", ".join(sorted(entry.__name__ for entry in ENTRIES))
        raise TypeError(
            f"op is {getattr(op, '__name__', op)!r}, a {type(op).__name__}; pass a public op of jaxops itself, and its "
            f"arguments behind it: {known}."
        ) from None


def take_apart(op: Callable, args: tuple, kwargs: dict[str, Any]) -> Call:
    """
    Raises:
      TypeError: not an op; a tracer or an abstract array instead of an array; arguments that the op does not take.
      ValueError: arrays on several devices.
      NotImplementedError: an op across devices.
    """
    entry = entry_of(op)
    try:
        bound = inspect.signature(op).bind(*args, **kwargs)
    except TypeError:
        op(*args, **kwargs)  # its own error
        raise
    passed = tuple(bound.arguments)
    bound.apply_defaults()
    names, arrays, trees, static = [], [], {}, {}
    for name, value in bound.arguments.items():
        leaves, tree = jax.tree_util.tree_flatten_with_path(value)
        slots, before = [], len(arrays)
        for path, leaf in leaves:
            whole = name + jax.tree_util.keystr(path)
            if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
                raise TypeError(
                    f"{whole} is a {type(leaf).__name__}; inspect runs the op: pass arrays, outside of jax.jit and "
                    "other transformations."
                )
            if isinstance(leaf, (jax.Array, np.ndarray)):
                slots.append(_Slot(len(arrays)))
                names.append(whole)
                arrays.append(leaf)
            else:
                slots.append(leaf)
        trees[name] = tree, slots
        if name in passed and len(arrays) == before:
            static[name] = value
    device = _device_of(names, arrays)
    placed = tuple(x if isinstance(x, jax.Array) else jax.device_put(x, device) for x in arrays)
    return Call(op, entry, static, tuple(names), placed, trees, device)


def _device_of(names: list[str], arrays: list[Any]) -> Any:
    found: dict[Any, str] = {}
    for name, x in zip(names, arrays, strict=True):
        for device in x.devices() if isinstance(x, jax.Array) else ():
            found.setdefault(device, name)
    if len(found) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in found.items())
        raise ValueError(f"the arrays are on several devices ({where}); inspect examines a call on one: use "
                         "jax.device_put, or pass one shard of each.")  # fmt: skip
    return next(iter(found), None) or default_device()
