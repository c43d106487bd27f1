"""Values of a simulated kernel: NumPy arrays with Triton's types and Triton's arithmetic."""

import dataclasses
import functools
import operator
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from tests.gluon_simulator import machine
from tests.gluon_simulator.machine import SimulationError


@dataclasses.dataclass(frozen=True)
class Type:
    """An element type, or with `element_ty` a pointer's, whose numbers are addresses in bytes."""

    name: str
    numpy: Any
    element_ty: "Type | None" = None
    layout: ClassVar = None  # of a tensor: not simulated

    @property
    def primitive_bitwidth(self) -> int:
        return 1 if self.name == "int1" else 8 * self.itemsize

    @property
    def itemsize(self) -> int:
        return np.dtype(self.numpy).itemsize

    @property
    def is_float(self) -> bool:
        return self.name.startswith(("float", "bfloat"))


NUMPY = {
    "int1": np.bool_, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "float8e4nv": ml_dtypes.float8_e4m3fn, "float8e5": ml_dtypes.float8_e5m2,
}  # fmt: skip
TYPES = {name: Type(name, numpy) for name, numpy in NUMPY.items()}
BY_NUMPY = {np.dtype(kind.numpy): kind for kind in TYPES.values()}
INT1, INT32, INT64, FLOAT32 = (TYPES[name] for name in ("int1", "int32", "int64", "float32"))


@functools.cache
def pointer_type(element: Type) -> Type:
    return Type(f"pointer<{element.name}>", np.int64, element)


# A pointer may be moved by so many elements in 32 bits. On the card that is 2**31; here arrays are smaller, too, so
# that a product of a row and a width that was not computed in 64 bits shows.
REACH = 1 << 16


class constexpr:
    """A constant of a module. In a kernel it is its value."""

    def __init__(self, value):
        self.value = value.value if isinstance(value, constexpr) else value

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "value"), name)

    def __bool__(self):
        return bool(self.value)

    def __index__(self):
        return operator.index(self.value)

    def __hash__(self):
        return hash(self.value)

    def __getitem__(self, i):
        return self.value[i]

    def __neg__(self):
        return -self.value


def unwrap(x: Any) -> Any:
    return x.value if isinstance(x, constexpr) else x


def _constant_operator(name: str) -> None:
    function = getattr(operator, name)

    def forward(self, other):
        return function(self.value, unwrap(other))

    def backward(self, other):
        return function(unwrap(other), self.value)

    setattr(constexpr, f"__{name.strip('_')}__", forward)
    if name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(constexpr, f"__r{name.strip('_')}__", backward)


OPERATORS = ("add", "sub", "mul", "floordiv", "mod", "truediv", "and_", "or_", "xor", "lshift", "rshift")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
for _name in OPERATORS + COMPARISONS:
    _constant_operator(_name)


class Tensor:
    """A tensor, or with shape () a number.

    reads: loads from shared memory that this value comes from and that no instruction has used yet.
    flight: the wgmma that has not been waited for.
    lanes: one number a thread, where threads hold different ones.
    product: a number in 32 bits that has a product of two numbers in it, none of them a constant.
    halves: in a cluster, for each dimension whether each program has half of it. The other half is not defined.
    """

    __slots__ = ("data", "flight", "halves", "lanes", "product", "reads", "type")

    def __init__(self, data, type: Type, halves=None, reads=(), flight=None, lanes=None):
        self.data, self.type = np.asarray(data, type.numpy), type
        self.halves = halves or (False,) * self.data.ndim
        self.reads, self.flight, self.lanes, self.product = reads, flight, lanes, False

    @property
    def dtype(self) -> Type:
        return self.type

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def used(self) -> np.ndarray:
        """The numbers, for an instruction that computes with them."""
        if self.flight is not None:
            raise SimulationError(f"a sum is read before the wait for its wgmma ({self.flight.where})")
        if self.lanes is not None:
            raise SimulationError("the threads hold different numbers here")
        for read in self.reads:
            read.finish()
        return self.data

    def like(self, data, halves=None) -> "Tensor":
        """The same numbers in another order: nothing is computed."""
        return Tensor(data, self.type, halves, self.reads, self.flight, self.lanes)

    def __bool__(self):
        return bool(self.used())

    def __index__(self):
        return operator.index(self.used().item())

    def item(self):
        return self.like(self.data.reshape(()))

    def to(self, kind, bitcast=False):
        kind, data = unwrap(kind), self.used()
        if bitcast and kind.element_ty is None:
            return Tensor(data.view(kind.numpy), kind, self.halves)
        with np.errstate(all="ignore"):
            return Tensor(data.astype(kind.numpy), kind, self.halves)

    def reshape(self, *shape):
        shape = tuple(map(operator.index, shape[0] if isinstance(shape[0], (list, tuple)) else shape))
        halves = tuple(i == 0 and self.halves[:1] == (True,) for i in range(len(shape)))
        if any(self.halves) and (
            self.halves[1:] != (False,) * (len(self.halves) - 1) or shape[0] != self.data.shape[0]
        ):
            raise SimulationError("a reshape that moves numbers between the programs of a cluster")
        return self.like(self.data.reshape(shape), halves)

    def permute(self, *order):
        order = tuple(order[0] if isinstance(order[0], (list, tuple)) else order)
        return self.like(self.data.transpose(order), tuple(self.halves[i] for i in order))

    def split(self):
        if self.data.shape[-1] != 2:
            raise SimulationError("split takes a last dimension of 2")
        return tuple(self.like(self.data[..., i], self.halves[:-1]) for i in range(2))

    def broadcast_to(self, *shape):
        shape = tuple(map(operator.index, shape[0] if isinstance(shape[0], (list, tuple)) else shape))
        return self.like(np.broadcast_to(self.data, shape), self.halves)

    def __getitem__(self, keys):
        keys = keys if isinstance(keys, tuple) else (keys,)
        if any(key is not None and key != slice(None) for key in keys):
            raise SimulationError("only [:, None] and the like")
        dims = iter(self.halves)
        return self.like(self.data[keys], tuple(False if key is None else next(dims) for key in keys))

    def __neg__(self):
        return Tensor(-self.used(), self.type, self.halves)

    def __invert__(self):
        return Tensor(~self.used(), self.type, self.halves)

    def __hash__(self):
        return id(self)


def own_part(shape, halves) -> tuple[slice, ...]:
    """The slices of a block that belong to the program of a cluster which runs now."""
    rank = machine.current().rank
    return tuple(
        slice(rank * (size // 2), (rank + 1) * (size // 2)) if half else slice(0, size)
        for size, half in zip(shape, halves, strict=True)
    )


def halves_of(layout, rank: int) -> tuple[bool, ...]:
    """From a layout's cga_layout."""
    bases = getattr(unwrap(layout), "cga_layout", None) or []
    if machine.current().programs == 1 or not bases:
        return (False,) * rank
    return tuple(bool(x) for x in bases[0])


def to_tensor(x) -> Tensor:
    """A constant as a number that the kernel computes with."""
    x = unwrap(x)
    if isinstance(x, Tensor):
        return x
    if isinstance(x, (bool, np.bool_)):
        return Tensor(x, INT1)
    if isinstance(x, int):
        return Tensor(x, INT32 if -(2**31) <= x < 2**31 else INT64)
    if isinstance(x, float):
        return Tensor(x, FLOAT32)
    raise SimulationError(f"{type(x).__name__} is no number")


def _promoted(a: Tensor, b: Tensor, weak_a: bool, weak_b: bool) -> Type:
    """Triton's rule: a constant takes the tensor's type unless it is a float and the tensor is not."""
    x, y = a.type, b.type
    if weak_a != weak_b and x.is_float == y.is_float and INT1 not in (x, y):
        return y if weak_a else x
    if x.is_float != y.is_float:
        return x if x.is_float else y
    if x.is_float:
        return x if x is y else FLOAT32
    return x if x.itemsize >= y.itemsize and x is not INT1 else y


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Towards zero, as C does, where Python rounds down."""
    if (y == 0).any():
        raise SimulationError("division by zero")
    quotient = np.abs(x.astype(np.int64)) // np.abs(y.astype(np.int64))
    return np.where((x < 0) != (y < 0), -quotient, quotient).astype(x.dtype)


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x - y * _divide(x, y)


FUNCTIONS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": _divide, "mod": _remainder,
    "truediv": np.divide, "and_": np.bitwise_and, "or_": np.bitwise_or, "xor": np.bitwise_xor,
    "lshift": np.left_shift, "rshift": np.right_shift,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def joined_halves(*tensors: Tensor) -> tuple[bool, ...]:
    """Of tensors that are broadcast against each other."""
    rank = max(tensor.data.ndim for tensor in tensors)
    padded = [(False,) * (rank - len(t.halves)) + tuple(t.halves) for t in tensors]
    return tuple(any(each) for each in zip(*padded, strict=True))


def _move(pointer: Tensor, offset: Tensor, constant: bool, sign: int) -> Tensor:
    numbers = offset.used()
    if offset.type is INT32 and not constant and numbers.size and np.abs(numbers.astype(np.int64)).max() >= REACH:
        raise SimulationError(f"a pointer moves by {numbers.max()} elements, computed in 32 bits: too many on the card")
    assert pointer.type.element_ty is not None
    if offset.product and pointer.type.element_ty.is_float:
        array = machine.current().machine.memory.array_at(int(pointer.data.flat[0]))
        if not array.is_operand:
            raise SimulationError("a place in a result by a product in 32 bits: on the card results are larger")
    step = sign * pointer.type.element_ty.itemsize
    halves = joined_halves(pointer, offset)
    return Tensor(pointer.used() + step * numbers.astype(np.int64), pointer.type, halves)


def binary(name: str, left, right) -> Tensor:
    left, right = unwrap(left), unwrap(right)
    a, b = to_tensor(left), to_tensor(right)
    weak_a, weak_b = not isinstance(left, Tensor), not isinstance(right, Tensor)
    if a.type.element_ty and name in ("add", "sub"):
        return _move(a, b, weak_b, 1 if name == "add" else -1)
    if b.type.element_ty and name == "add":
        return _move(b, a, weak_a, 1)
    kind = FLOAT32 if name == "truediv" and not a.type.is_float | b.type.is_float else _promoted(a, b, weak_a, weak_b)
    with np.errstate(all="ignore"):
        x, y = a.used().astype(kind.numpy), b.used().astype(kind.numpy)
        found = FUNCTIONS[name](x, y)
    result = Tensor(found, INT1 if name in COMPARISONS else kind, joined_halves(a, b))
    result.product = kind is INT32 and (
        (name == "mul" and not (weak_a or weak_b or result.shape)) or (name in ("add", "sub") and a.product | b.product)
    )
    return result


def promote_pair(left, right) -> tuple[np.ndarray, np.ndarray, Type, tuple[bool, ...]]:
    """For functions of two values: `where`, `minimum`."""
    left, right = unwrap(left), unwrap(right)
    a, b = to_tensor(left), to_tensor(right)
    kind = a.type if a.type.element_ty else _promoted(a, b, not isinstance(left, Tensor), not isinstance(right, Tensor))
    return a.used().astype(kind.numpy), b.used().astype(kind.numpy), kind, joined_halves(a, b)


def _tensor_operator(name: str) -> None:
    short = name.strip("_")
    setattr(Tensor, f"__{short}__", lambda self, other: binary(name, self, other))
    if name not in COMPARISONS:
        setattr(Tensor, f"__r{short}__", lambda self, other: binary(name, other, self))


for _name in OPERATORS + COMPARISONS:
    _tensor_operator(_name)
