"""The functions of `gl` and `tl` that jaxops' kernels use."""

import dataclasses
import inspect
import math
import operator
from typing import Any

import numpy as np

from tests.gluon_simulator import machine, ptx
from tests.gluon_simulator.machine import SimulationError
from tests.gluon_simulator.shared import Buffer
from tests.gluon_simulator.tensors import (
    FLOAT32,
    INT32,
    Tensor,
    binary,
    halves_of,
    joined_halves,
    own_part,
    promote_pair,
    to_tensor,
    unwrap,
)

_builtins = {"range": range, "min": min, "max": max}


class Jit:
    """`gluon.jit` and `triton.jit`: the function itself. In it range, min and max are Triton's, of 32-bit integers."""

    def __init__(self, fn):
        self.fn, self.__name__ = fn, fn.__name__
        self.signature = inspect.signature(fn)
        fn.__globals__.update(range=_range, min=_least, max=_largest)

    def __call__(self, *args, **named):
        return self.fn(*map(unwrap, args), **named)


def jit(fn=None, *, repr=None):
    return Jit if fn is None else Jit(fn)


def aggregate(cls):
    return dataclasses.dataclass(cls)


def _range(*args):
    args = [unwrap(x) for x in args]
    numbers = _builtins["range"](*map(operator.index, args))
    return (Tensor(x, INT32) for x in numbers) if any(isinstance(x, Tensor) for x in args) else numbers


def _least(a, b):
    constants = not any(isinstance(unwrap(x), Tensor) for x in (a, b))
    return _builtins["min"](unwrap(a), unwrap(b)) if constants else minimum(a, b)


def _largest(a, b):
    constants = not any(isinstance(unwrap(x), Tensor) for x in (a, b))
    return _builtins["max"](unwrap(a), unwrap(b)) if constants else maximum(a, b)


def minimum(a, b, propagate_nan=None) -> Tensor:
    """As `maximum`."""
    x, y, kind, halves = promote_pair(a, b)
    return Tensor((np.minimum if unwrap(propagate_nan) == "all" else np.fmin)(x, y), kind, halves)


def maximum(a, b, propagate_nan=None) -> Tensor:
    """Of a number and NaN the number, unless NaN is propagated."""
    x, y, kind, halves = promote_pair(a, b)
    return Tensor((np.maximum if unwrap(propagate_nan) == "all" else np.fmax)(x, y), kind, halves)


def where(condition, a, b) -> Tensor:
    (x, y, kind, _), chosen = promote_pair(a, b), to_tensor(condition)
    return Tensor(np.where(chosen.used(), x, y), kind, joined_halves(chosen, to_tensor(a), to_tensor(b)))


def cdiv(a, b):
    a, b = unwrap(a), unwrap(b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return binary("floordiv", binary("sub", binary("add", a, b), 1), b)
    return -(-a // b)


def arange(start, end, layout=None) -> Tensor:
    return Tensor(np.arange(unwrap(start), unwrap(end)), INT32, halves_of(layout, 1))


def full(shape, value, dtype, layout=None) -> Tensor:
    shape, dtype = tuple(operator.index(n) for n in unwrap(shape)), unwrap(dtype)
    numbers = np.broadcast_to(to_tensor(value).used().astype(dtype.numpy), shape)
    return Tensor(numbers, dtype, halves_of(layout, len(shape)))


def zeros(shape, dtype, layout=None) -> Tensor:
    return full(shape, 0, dtype, layout)


def zeros_like(x: Tensor) -> Tensor:
    return Tensor(np.zeros(x.data.shape), x.type, x.halves)


def convert_layout(x: Tensor, layout, assert_trivial=False) -> Tensor:
    return x.like(x.data, x.halves)


def cast(x, dtype, bitcast=False) -> Tensor:
    return to_tensor(x).to(dtype, bitcast)


def _combined(x: Tensor, axis, reduce) -> Tensor:
    axis = unwrap(axis)
    if x.halves[axis]:
        raise SimulationError("a reduction over what the programs of a cluster divide")
    return Tensor(reduce(x.used()), x.type, x.halves[:axis] + x.halves[axis + 1 :])


def sum(x: Tensor, axis) -> Tensor:
    return _combined(x, axis, lambda numbers: numbers.sum(axis=unwrap(axis), dtype=x.type.numpy))


def max(x: Tensor, axis) -> Tensor:
    """Of numbers and NaN the largest number."""
    return _combined(x, axis, lambda numbers: np.fmax.reduce(numbers, axis=unwrap(axis)))


def cumsum(x: Tensor, axis) -> Tensor:
    return Tensor(np.cumsum(x.used(), axis=unwrap(axis), dtype=x.type.numpy), x.type, x.halves)


def reduce(x: Tensor, axis, function) -> Tensor:
    def fold(numbers):
        parts = [Tensor(part, x.type) for part in np.moveaxis(numbers, unwrap(axis), 0)]
        while len(parts) > 1:
            parts = [function(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
        return parts[0].data

    return _combined(x, axis, fold)


def join(a: Tensor, b: Tensor) -> Tensor:
    return Tensor(np.stack([a.used(), b.used()], axis=-1), a.type, (*a.halves, False))


def exp(x: Tensor) -> Tensor:
    return Tensor(np.exp(x.used()), x.type, x.halves)


def exp2(x: Tensor) -> Tensor:
    return Tensor(np.exp2(x.used()), x.type, x.halves)


def log2(x: Tensor) -> Tensor:
    with np.errstate(divide="ignore"):  # of 0 it is -inf
        return Tensor(np.log2(x.used()), x.type, x.halves)


def erf(x: Tensor) -> Tensor:
    return Tensor(np.vectorize(math.erf, otypes=[np.float32])(x.used()), x.type, x.halves)


# Global memory


def _chosen(pointer: Tensor, mask, *others) -> tuple[np.ndarray, tuple[int, ...], tuple[bool, ...]]:
    """Which elements are accessed: those of the mask that this program of a cluster has."""
    tensors = [pointer, *(to_tensor(x) for x in (mask, *others) if x is not None)]
    shape = np.broadcast_shapes(*(x.data.shape for x in tensors))
    halves = joined_halves(*tensors)
    halves = (False,) * (len(shape) - len(halves)) + tuple(halves)
    own = np.zeros(shape, bool)
    own[own_part(shape, halves)] = True
    if mask is not None:
        own &= to_tensor(mask).used()
    return own, shape, halves


def load(pointer: Tensor, mask=None, other=None, cache_modifier="") -> Tensor:
    agent, kind = machine.current(), pointer.type.element_ty
    chosen, shape, halves = _chosen(pointer, mask, other)
    found = np.empty(shape, kind.numpy)
    found.reshape(-1).view(np.uint8)[:] = 0xFF
    if other is not None:
        found[...] = to_tensor(other).used().astype(kind.numpy)
    addresses = np.broadcast_to(pointer.used(), shape)[chosen]
    found[chosen] = agent.machine.memory.load(addresses, kind, fresh=unwrap(cache_modifier) == ".cg")
    return Tensor(found, kind, halves)


def store(pointer: Tensor, value, mask=None) -> None:
    _write(pointer, value, mask, machine.current().machine.memory.store)


def _write(pointer: Tensor, value, mask, write) -> None:
    value, kind = to_tensor(value), pointer.type.element_ty
    if value.type is not kind:
        value = value.to(kind)
    chosen, shape, _ = _chosen(pointer, mask, value)
    addresses, numbers = (np.broadcast_to(x.used(), shape)[chosen] for x in (pointer, value))
    write(addresses, numbers, kind)
    machine.current().stored = True


def _atomic(pointer: Tensor, value, mask, change) -> Tensor:
    value = to_tensor(value)
    chosen, shape, halves = _chosen(pointer, mask, value)
    addresses, numbers = (np.broadcast_to(x.used(), shape) for x in (pointer, value))
    before = np.zeros(shape, np.int32)
    for at in zip(*np.nonzero(chosen), strict=True) if shape else [()] * int(chosen):
        before[at] = ptx.atomic(int(addresses[at]), lambda old, at=at: change(old, int(numbers[at])))
    return Tensor(before, INT32, halves)


def atomic_add(pointer: Tensor, value, mask=None, sem="acq_rel") -> Tensor | None:
    if pointer.type.element_ty is FLOAT32:  # a reduction: no kernel reads what was there before
        return _write(pointer, value, mask, machine.current().machine.memory.add_to)
    return _atomic(pointer, value, mask, operator.add)


def atomic_max(pointer: Tensor, value, mask=None, sem="acq_rel") -> Tensor:
    return _atomic(pointer, value, mask, _builtins["max"])


# The launch


def program_id(axis) -> Tensor:
    return Tensor(machine.current().program.number, INT32)


def num_programs(axis) -> Tensor:
    return Tensor(machine.current().machine.grid, INT32)


def num_ctas() -> int:
    return machine.current().programs


def static_assert(condition, message="") -> None:
    if not unwrap(condition):
        raise SimulationError(f"static_assert: {message}")


def barrier(cluster=False) -> None:
    """The threads of a partition are simulated together: it tells that all have stored what they store."""
    machine.current().stored = False
    if cluster:
        machine.current().meet_cluster()


def warp_specialize(partitions, worker_num_warps, worker_num_regs) -> None:
    machine.current().machine.specialize(partitions, list(map(unwrap, worker_num_warps)))


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack) -> Tensor:
    return ptx.run(unwrap(asm), unwrap(constraints), [to_tensor(x) for x in args], unwrap(dtype), unwrap(pack))


allocate_shared_memory = Buffer.allocate
_NAMES = """
    minimum maximum where cdiv arange full zeros zeros_like convert_layout cast sum max cumsum reduce join exp exp2 log2
    erf load store atomic_add atomic_max program_id num_programs num_ctas static_assert barrier warp_specialize
    to_tensor inline_asm_elementwise allocate_shared_memory
"""
NAMES: dict[str, Any] = {name: globals()[name] for name in _NAMES.split()}
