"""Shared memory: buffers, who wrote and read each four bytes of them, and mbarriers."""

import math
import operator

import numpy as np

from jaxops._lib.planning.device import HOPPER_SHARED_BYTES
from tests.gluon_simulator import machine
from tests.gluon_simulator.machine import Agent, SimulationError
from tests.gluon_simulator.tensors import INT64, Tensor, Type, halves_of, own_part, unwrap

_GRAIN = 4  # bytes that are watched together


class Access:
    """A read or write of shared memory.

    asynchronous: by TMA or the tensor core, in the async proxy.
    issued, time: its partition's count when it began, and when it is over; None before. A load is over when its value
      is used: an arrival at an mbarrier orders it before other threads' stores, but not before TMA's.
    barrier, phase: of a write by TMA or cp.async: the phase of the mbarrier that tells of it.
    """

    __slots__ = ("agent", "asynchronous", "barrier", "issued", "number", "phase", "time", "what", "where")

    def __init__(self, agent: Agent, what: str, asynchronous: bool, over: bool, barrier=None):
        self.agent, self.what, self.asynchronous = agent, what, asynchronous
        self.issued = agent.time
        self.time = agent.time if over else None
        self.barrier, self.phase = barrier, None
        self.where = machine.where()
        self.number = len(agent.machine.accesses)
        agent.machine.accesses.append(self)

    def finish(self) -> None:
        if self.time is None:
            self.time = self.agent.time

    def is_known_to(self, agent: Agent, asynchronous: bool) -> bool:
        """Whether it is over before what the agent does now, in the async proxy or not."""
        if self.barrier is not None:
            seen = agent.published if asynchronous and not self.asynchronous else agent.clock
            return self.phase is not None and seen[self.barrier.clock] > self.phase
        if not self.asynchronous and not asynchronous:
            return agent.clock[self.agent.index] >= self.issued
        if self.time is None:
            return False
        through_fence = asynchronous and not self.asynchronous and self.what == "write"
        seen = agent.published if through_fence else agent.clock
        return seen[self.agent.index] >= self.time

    def __str__(self):
        return f"{self.what} by {self.agent} at {self.where}"


class Allocation:
    """A buffer of one program: its bytes, and of each grain the last write and each partition's last read."""

    def __init__(self, size: int, name: str):
        self.bytes = np.full(-(-size // 16) * 16, 0xFF, np.uint8)  # NaN in every format
        self.name = name
        grains = self.bytes.size // _GRAIN
        self.writes = np.zeros(grains, np.int32)
        self.reads: dict[tuple[int, bool], np.ndarray] = {}

    def reads_of(self, access: Access) -> np.ndarray:
        key = access.agent.index, access.asynchronous
        if key not in self.reads:
            self.reads[key] = np.zeros(self.writes.size, np.int32)
        return self.reads[key]


def _numbers(marks: np.ndarray) -> list[int]:
    if not marks.size:
        return []
    first = marks.flat[0]
    return [int(first)] if (marks == first).all() else np.unique(marks).tolist()


class Buffer:
    """gl.shared_memory_descriptor. Each program of a cluster has one of the whole shape, and uses its own part."""

    def __init__(self, number: int, offset: int, shape, strides, type: Type, layout):
        self.number, self.offset, self.shape, self.strides = number, offset, list(shape), list(strides)
        self.type = self.dtype = type
        self.layout = layout

    @classmethod
    def allocate(cls, type, shape, layout) -> "Buffer":
        type, shape, program = unwrap(type), [operator.index(n) for n in unwrap(shape)], machine.current().program
        size = math.prod(shape) * type.itemsize
        program.shared.append(Allocation(size, machine.where()))
        program.shared_bytes += size // 2 if any(halves_of(layout, len(shape))) else size
        if program.shared_bytes > HOPPER_SHARED_BYTES:
            raise SimulationError(f"{program.shared_bytes} bytes of shared memory")
        return cls(len(program.shared) - 1, 0, shape, _strides(shape, type), type, unwrap(layout))

    def _with(self, **changes) -> "Buffer":
        given = {"offset": self.offset, "shape": self.shape, "strides": self.strides, "type": self.type}
        return Buffer(self.number, layout=changes.pop("layout", self.layout), **(given | changes))

    def index(self, i) -> "Buffer":
        i = operator.index(i)
        if not 0 <= i < self.shape[0]:
            raise SimulationError(f"buffer {i} of {self.shape[0]}")
        return self._with(offset=self.offset + i * self.strides[0], shape=self.shape[1:], strides=self.strides[1:])

    def slice(self, start, length, dim=0) -> "Buffer":
        start, length = operator.index(start), operator.index(length)
        if start < 0 or start + length > self.shape[dim]:
            raise SimulationError(f"rows {start} to {start + length} of {self.shape[dim]}")
        shape = [length if i == dim else n for i, n in enumerate(self.shape)]
        return self._with(offset=self.offset + start * self.strides[dim], shape=shape)

    def permute(self, order) -> "Buffer":
        return self._with(shape=[self.shape[i] for i in order], strides=[self.strides[i] for i in order])

    def reshape(self, shape) -> "Buffer":
        return self.reinterpret(self.type, shape, self.layout)

    def reinterpret(self, dtype=None, shape=None, layout=None) -> "Buffer":
        type, shape = unwrap(dtype) or self.type, [operator.index(n) for n in unwrap(shape or self.shape)]
        if self.strides != _strides(self.shape, self.type) or math.prod(shape) * type.itemsize > self.nbytes:
            raise SimulationError("a buffer that is no whole block, or too small, taken as another one")
        return self._with(shape=shape, strides=_strides(shape, type), type=type, layout=unwrap(layout))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.type.itemsize

    def allocation(self, rank: int | None = None) -> Allocation:
        program = machine.current().program
        return (program if rank is None else program.cluster[rank]).shared[self.number]

    def view(self, part: tuple[slice, ...], rank: int | None = None) -> np.ndarray:
        memory = self.allocation(rank).bytes
        whole = np.ndarray(tuple(self.shape), self.type.numpy, memory.data, self.offset, tuple(self.strides))
        return whole[part]

    def _grains(self, marks: np.ndarray, part: tuple[slice, ...]) -> np.ndarray:
        """The watched grains of a part of the buffer."""
        itemsize, shape, strides, offset = self.type.itemsize, [], [], self.offset
        for size, stride, cut in zip(self.shape, self.strides, part, strict=True):
            offset += cut.start * stride
            count = cut.stop - cut.start
            if itemsize < _GRAIN and stride == itemsize and size > 1:
                count, stride = -(-count * itemsize // _GRAIN), _GRAIN
            shape.append(count)
            strides.append(stride // _GRAIN * marks.itemsize)
        return np.ndarray(tuple(shape), marks.dtype, marks.data, offset // _GRAIN * marks.itemsize, tuple(strides))

    def read(self, access: Access, part: tuple[slice, ...], rank: int | None = None) -> None:
        """Notes it, after the checks."""
        memory = self.allocation(rank)
        for number in _numbers(self._grains(memory.writes, part)):
            if number == 0 and not self.type.is_float:  # floats are NaN: rows that are not stored may hold anything
                raise SimulationError(f"{access} of what nobody has written ({memory.name})")
            if number:
                self._check(access, access.agent.machine.accesses[number])
        self._grains(memory.reads_of(access), part)[...] = access.number

    def write(self, access: Access, part: tuple[slice, ...], rank: int | None = None) -> None:
        memory, accesses = self.allocation(rank), access.agent.machine.accesses
        marks = self._grains(memory.writes, part)
        for number in _numbers(marks):
            if number:
                self._check(access, accesses[number])
        for reads in memory.reads.values():
            before = self._grains(reads, part)
            for number in _numbers(before):
                # A warp's own loads and stores are in order.
                own = number and accesses[number].agent is access.agent
                if number and not (own and not access.asynchronous and not accesses[number].asynchronous):
                    self._check(access, accesses[number])
            before[...] = 0
        marks[...] = access.number

    def _check(self, access: Access, before: Access) -> None:
        if before.is_known_to(access.agent, access.asynchronous):
            return
        fence = before.time is not None and access.agent.clock[before.agent.index] >= before.time
        reason = "no fence_async_shared between them" if fence and before.barrier is None else "nothing orders them"
        raise SimulationError(f"race in shared memory: {access} after the {before}: {reason}")

    def load(self, layout) -> Tensor:
        agent, halves = machine.current(), halves_of(layout, len(self.shape))
        part = own_part(self.shape, halves)
        access = Access(agent, "read", False, over=False)
        self.read(access, part)
        agent.unfinished.append(access)
        return Tensor(self.view((...,)).copy(), self.type, halves, reads=(access,))

    def gather(self, index: Tensor, axis: int) -> Tensor:
        """Elements of a buffer of one dimension."""
        at, agent = index.used(), machine.current()
        if len(self.shape) != 1 or at.min() < 0 or at.max() >= self.shape[0]:
            raise SimulationError(f"elements {at.min()} to {at.max()} of a buffer of {self.shape}")
        access = Access(agent, "read", False, over=False)
        self.read(access, (slice(int(at.min()), int(at.max()) + 1),))
        agent.unfinished.append(access)
        return Tensor(self.view((...,))[at], self.type, index.halves, reads=(access,))

    def store(self, value: Tensor) -> None:
        if list(value.shape) != self.shape or value.type is not self.type:
            raise SimulationError(f"{value.type.name}{value.shape} stored in a buffer of {self.type.name}{self.shape}")
        part = own_part(self.shape, value.halves)
        numbers = value.used()
        self.write(Access(machine.current(), "write", False, over=True), part)
        self.view(part)[...] = numbers[part]


def _strides(shape, type: Type) -> list[int]:
    return [type.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]


class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for, and what those who arrived had done."""

    def __init__(self, owner: "machine.Program", count: int, agent: Agent):
        self.owner, self.count, self.pending, self.bytes, self.phase = owner, count, count, 0, 0
        self.clock = agent.machine.new_clock()
        self.given = [np.zeros_like(agent.clock), np.zeros_like(agent.clock)]
        self.released = [np.zeros_like(agent.clock), np.zeros_like(agent.clock)]
        self.remote: dict[int, int] = {}  # last arrivals from the cluster's other program

    def arrive(self, agent: Agent, count: int, bytes: int = 0, knowing: bool = True) -> None:
        if self.owner is not agent.program:
            self.remote[agent.index] = agent.time
            if self.owner.ended:
                raise SimulationError("an arrival at an mbarrier of a program that has ended")
        if self.pending < count:
            raise SimulationError(f"{count} arrivals, where the phase waits for {self.pending}")
        if knowing:
            for into, new in zip(self.given, agent.release(), strict=True):
                np.maximum(into, new, out=into)
        self.pending -= count
        self.bytes += bytes
        self._advance()

    def complete(self, bytes: int) -> None:
        """TMA has written so many."""
        self.bytes -= bytes
        self._advance()

    def _advance(self) -> None:
        if self.pending == 0 and self.bytes < 0:
            raise SimulationError("TMA has brought more bytes than were expected")
        if self.pending == 0 and self.bytes == 0:
            for into, new in zip(self.released, self.given, strict=True):
                np.maximum(into, new, out=into)
                new[...] = 0
            self.phase, self.pending = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        """As the hardware: true after an odd number of phases more or fewer, too."""
        return self.phase % 2 != parity

    def acquire(self, agent: Agent) -> None:
        agent.acquire(*self.released)
        agent.clock[self.clock] = max(self.phase, agent.clock[self.clock])


def two_programs(buffer: Buffer) -> bool:
    """Whether it is an mbarrier that both programs of a cluster share, in the first one's memory."""
    bases = getattr(buffer.layout, "cga_layout", None) or []
    return machine.current().programs > 1 and bool(bases) and not any(bases[0])


def barrier_of(buffer: Buffer, rank: int | None = None) -> Barrier:
    program = machine.current().program
    rank = 0 if two_programs(buffer) else rank
    owner = program if rank is None else program.cluster[rank]
    key = buffer.number, buffer.offset
    if buffer.type is not INT64 or key not in owner.barriers:
        raise SimulationError("an mbarrier that was not initialized")
    return owner.barriers[key]
