"""Global memory: arrays with addresses, and who wrote each element."""

import numpy as np

from tests.gluon_simulator import machine
from tests.gluon_simulator.machine import SimulationError
from tests.gluon_simulator.tensors import BY_NUMPY, Tensor, Type, pointer_type

_SPACING = 40  # bits of an address inside an array, which starts in their middle


class Array:
    """An operand or a result in global memory.

    numbers: flat. writers, times: of each element the clock's index and count of the partition that stored it, 0 for
    what was there before the launch.
    """

    def __init__(self, number: int, numbers: np.ndarray, name: str):
        self.base, self.numbers, self.name = (2 * number + 1) << (_SPACING - 1), numbers.reshape(-1), name
        self.type: Type = BY_NUMPY[numbers.dtype]
        self.is_operand = False  # which another kernel may use as well
        self.writers = np.zeros(self.numbers.size, np.int32)
        self.times = np.zeros(self.numbers.size, np.int64)

    def pointer(self) -> Tensor:
        return Tensor(self.base, pointer_type(self.type))

    def undefined(self, at) -> np.ndarray:
        """Which elements another partition stores in this launch, without a word that it has."""
        writers = self.writers[at]
        clock, me = machine.current().clock, machine.current().index
        return (writers > 0) & (writers - 1 != me) & (clock[writers - 1] < self.times[at])

    def check_written(self) -> None:
        if self.is_operand:
            raise SimulationError(f"{self.name} is written, which is neither a result nor a Scratch")

    def mark(self, at, by_tma: bool = False) -> None:
        """Stores. A launch writes each element once: twice would be a tile in another's place, whichever comes last."""
        agent = machine.current()
        self.check_written()
        if self.writers[at].any():
            raise SimulationError(f"an element of {self.name} is stored twice")
        self.writers[at] = agent.index + 1
        # What TMA has stored, no one is told of before the launch ends.
        self.times[at] = np.iinfo(np.int64).max if by_tma else agent.time


class Memory:
    """The arrays of a launch."""

    def __init__(self):
        self.arrays: list[Array] = []

    def add(self, numbers: np.ndarray, name: str) -> Array:
        self.arrays.append(Array(len(self.arrays), numbers, name))
        return self.arrays[-1]

    def array_at(self, address: int) -> Array:
        if not 0 <= address >> _SPACING < len(self.arrays):
            raise SimulationError("a pointer to no array")
        return self.arrays[address >> _SPACING]

    def find(self, addresses: np.ndarray, itemsize: int) -> tuple[Array, np.ndarray]:
        """The array that all addresses lie in, and their offsets in it in bytes."""
        array = self.array_at(int(addresses.flat[0]))
        offsets = addresses - array.base
        if offsets.min() < 0 or offsets.max() + itemsize > array.numbers.nbytes:
            raise SimulationError(
                f"out of bounds of {array.name}: elements {offsets.min() // itemsize} to "
                f"{offsets.max() // itemsize} of {array.numbers.nbytes // itemsize}"
            )
        if (offsets % itemsize).any():
            raise SimulationError(f"an address in {array.name} that is no multiple of {itemsize} bytes")
        return array, offsets

    def _elements(self, pointers: np.ndarray, type: Type) -> tuple[Array, np.ndarray, np.ndarray]:
        array, offsets = self.find(pointers, type.itemsize)
        numbers = array.numbers.view(type.numpy) if array.type is not type else array.numbers
        return array, numbers, offsets // type.itemsize

    def load(self, pointers: np.ndarray, type: Type, fresh: bool) -> np.ndarray:
        """fresh: from L2. Else from L1, which does not know of other programs' stores."""
        if not pointers.size:
            return np.zeros(pointers.shape, type.numpy)
        array, numbers, at = self._elements(pointers, type)
        if array.type is type:
            if array.undefined(at).any():
                raise SimulationError(f"a read of {array.name}, which another partition writes in the same launch")
            me = machine.current()
            own = [agent.index + 1 for agent in me.machine.agents if agent.program is me.program]
            if not fresh and not np.isin(array.writers[at], [0, *own]).all():
                raise SimulationError(f"a load through L1 of {array.name}, which another program has stored")
        return numbers[at]

    def store(self, pointers: np.ndarray, values: np.ndarray, type: Type) -> None:
        if not pointers.size:
            return
        array, numbers, at = self._elements(pointers, type)
        if np.unique(at).size != at.size:
            raise SimulationError(f"one store writes an element of {array.name} twice")
        ratio = type.itemsize // array.type.itemsize  # two FP8 numbers may be stored as one of 16 bits
        array.mark((at.reshape(-1, 1) * ratio + np.arange(ratio)).reshape(-1))
        numbers[at] = values

    def add_to(self, pointers: np.ndarray, values: np.ndarray, type: Type) -> None:
        """A reduction in L2. A launch may do one to each element, or the sum would depend on their order."""
        if pointers.size:
            _, numbers, at = self._elements(pointers, type)
            self.store(pointers, numbers[at] + values, type)
