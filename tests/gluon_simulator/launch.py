"""A launch: the kernel's arguments from jax-triton's, one machine, and the results."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util

from tests.gluon_simulator.hopper import Descriptor
from tests.gluon_simulator.language import Jit
from tests.gluon_simulator.machine import Machine
from tests.gluon_simulator.memory import Memory
from tests.gluon_simulator.tensors import INT32, INT64, Tensor


@tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticArg:
    value: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def maybe_wrap(cls, x):
        return x if isinstance(x, jax.Array) else cls(x)


@tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputPlaceholder:
    ordinal: int = dataclasses.field(metadata={"static": True})


@tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TensorDescriptor:
    base: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    strides: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    block_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    layout: Any = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def from_array(cls, array, block_shape, layout=None):
        strides = [1]
        for size in array.shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        return cls(array, array.shape, tuple(strides), tuple(block_shape), layout)


@dataclasses.dataclass
class Settings:
    """
    Attributes:
      seed: of the order of events.
      launched: names.
      error: the last one, which JAX does not pass on as it is.
    """

    seed: int = 0
    launched: list[str] = dataclasses.field(default_factory=list)
    error: BaseException | None = None


settings = Settings()


@contextlib.contextmanager
def setting(**values: Any) -> Iterator[Settings]:
    global settings
    before, settings = settings, Settings(**values)
    try:
        yield settings
    finally:
        settings = before


def run(
    kernel: Jit, name: str, tree, results: tuple, grid: int, programs: int, aliases: dict[int, int],
    constants: dict[str, Any], *arrays,
) -> list[np.ndarray]:  # fmt: skip
    """Simulates one launch. aliases: as jax-triton counts operands."""
    memory = Memory()
    found: list[Any] = []
    owners: dict[int, Any] = {}
    arguments = jax.tree.unflatten(tree, range(len(arrays)))
    leaves = jax.tree.leaves(
        arguments, is_leaf=lambda x: isinstance(x, (TensorDescriptor, StaticArg, OutputPlaceholder))
    )
    leaves = [x for x in leaves if not isinstance(x, OutputPlaceholder)]
    numbers = {out: _number(leaves[operand]) for operand, out in aliases.items()}
    for out, (shape, dtype) in enumerate(results):
        if out in numbers:
            start = np.array(arrays[numbers[out]], dtype)
        else:
            start = np.frombuffer(b"\xff" * (int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).copy()
        found.append(memory.add(start, f"result {out} of {name}"))
        if out in numbers:
            owners[numbers[out]] = found[-1]

    def array(number: int):
        if number not in owners:
            owners[number] = memory.add(np.array(arrays[number]), f"operand {number} of {name}")
            owners[number].is_operand = True
        return owners[number]

    def value(x: Any, inside: bool) -> Any:
        if isinstance(x, OutputPlaceholder):
            return found[x.ordinal].pointer()
        if isinstance(x, StaticArg):
            return _constant(x.value, inside)
        if isinstance(x, TensorDescriptor):
            return Descriptor(array(x.base), x.shape, x.strides, x.block_shape, x.layout)
        if isinstance(x, (tuple, list)):
            return tuple(value(each, True) for each in x)
        return None if x is None else array(x).pointer()

    names = [x for x in kernel.signature.parameters if x not in constants]
    given = {parameter: value(x, False) for parameter, x in zip(names, arguments, strict=True)}
    machine = Machine(memory, grid, programs, settings.seed)
    settings.launched.append(name)
    try:
        machine.run(lambda: kernel.fn(**given, **constants))
    except BaseException as error:
        settings.error = error
        raise
    return [x.numbers.reshape(shape) for x, (shape, _) in zip(found, results, strict=True)]


def simulate(
    kernel: Callable[..., Any], arrays: Sequence[np.ndarray] = (), *, results: Sequence[np.ndarray] = (), grid: int = 1,
    programs: int = 1, seed: int = 0,
) -> list[np.ndarray]:  # fmt: skip
    """Runs kernel(*arrays, *results), each as a `memory.Array`, without JAX; returns what the results then hold."""
    memory = Memory()
    given = [memory.add(np.array(x), f"array {i}") for i, x in enumerate([*arrays, *results])]
    for operand in given[: len(arrays)]:
        operand.is_operand = True
    Machine(memory, grid, programs, seed).run(lambda: kernel(*given))
    return [x.numbers.reshape(like.shape) for x, like in zip(given[len(arrays) :], results, strict=True)]


def _number(leaf: Any) -> int:
    return leaf.base if isinstance(leaf, TensorDescriptor) else leaf


def _constant(x: Any, inside: bool) -> Any:
    """A number; 1 is a constant of the compiled kernel, unless it is in a tuple."""
    if isinstance(x, bool) or not isinstance(x, int) or (x == 1 and not inside):
        return x
    return Tensor(x, INT32 if -(2**31) <= x < 2**31 else INT64)
