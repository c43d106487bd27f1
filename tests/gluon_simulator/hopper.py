"""Hopper's instructions: mbarriers, TMA, cp.async, wgmma."""

import operator

import numpy as np

from tests.gluon_simulator import machine
from tests.gluon_simulator.layouts import MBarrierLayout
from tests.gluon_simulator.machine import SimulationError
from tests.gluon_simulator.memory import Array
from tests.gluon_simulator.shared import Access, Barrier, Buffer, barrier_of, two_programs
from tests.gluon_simulator.tensors import INT64, Tensor, halves_of, own_part, to_tensor, unwrap


def true(pred) -> bool:
    return bool(to_tensor(pred).used())


# mbarriers

_MOST_WAITS = 20_000  # of one partition


def allocate_mbarrier(batch=None, two_ctas=False) -> Buffer:
    programs = machine.current().programs
    bases = ([[0]] if unwrap(two_ctas) else [[1]]) if programs > 1 else []
    each = 1 if unwrap(two_ctas) else programs
    return Buffer.allocate(INT64, [each] if batch is None else [unwrap(batch), each], MBarrierLayout(bases))


def init(mbarrier: Buffer, count) -> None:
    agent = machine.current()
    count = operator.index(unwrap(count)) * (2 if two_programs(mbarrier) else 1)
    if two_programs(mbarrier) and agent.rank:
        return
    agent.program.barriers[mbarrier.number, mbarrier.offset] = Barrier(agent.program, count, agent)


def wait(mbarrier: Buffer, phase, pred=True) -> None:
    agent = machine.current()
    if not true(pred) or (two_programs(mbarrier) and agent.rank):  # only the first program waits on one of both
        return
    barrier, parity = barrier_of(mbarrier), operator.index(unwrap(phase)) & 1
    agent.waits += 1
    if agent.waits > _MOST_WAITS:
        raise SimulationError("a loop that does not end")
    if not barrier.passed(parity):
        agent.wait(lambda: barrier.passed(parity))
    agent.pause()
    barrier.acquire(agent)


def arrive(mbarrier: Buffer, *, count=1, pred=True) -> None:
    agent = machine.current()
    if true(pred):
        barrier_of(mbarrier).arrive(agent, operator.index(unwrap(count)))
        agent.pause()


def expect(mbarrier: Buffer, bytes_per_cta, pred=True) -> None:
    if true(pred):
        barrier_of(mbarrier).arrive(machine.current(), 1, operator.index(unwrap(bytes_per_cta)))


def fence_async_shared(cluster=False) -> None:
    machine.current().fence()


# TMA


class Descriptor:
    """A TMA descriptor: boxes of an array, with strides in elements."""

    def __init__(self, array: Array, shape, strides, block_shape, layout):
        self.array, self.shape, self.strides = array, tuple(shape), tuple(strides)
        self.block_shape, self.layout, self.dtype = list(block_shape), layout, array.type
        if self.strides[-1] != 1 or any(stride * self.dtype.itemsize % 16 for stride in self.strides[:-1]):
            raise SimulationError(f"a TMA descriptor with the strides {self.strides} of {self.dtype.name}")
        if self.block_shape[-1] * self.dtype.itemsize % 16:
            raise SimulationError(f"a TMA box of {self.block_shape} {self.dtype.name} has rows of no whole 16 bytes")

    @property
    def nbytes_per_cta(self) -> int:
        bases = getattr(self.layout, "cga_layout", None) or []
        size = int(np.prod(self.block_shape)) * self.dtype.itemsize
        return size // 2 if any(any(basis) for basis in bases) else size

    def box(self, coord, part: tuple[slice, ...]) -> tuple[tuple[slice, ...], np.ndarray]:
        """Of the elements inside the array their place in the part, and their numbers in the array."""
        starts = [int(to_tensor(x).used()) + cut.start for x, cut in zip(coord, part, strict=True)]
        if starts[-1] * self.dtype.itemsize % 16:
            raise SimulationError(f"a TMA box that starts at {starts}: no multiple of 16 bytes in its row")
        sizes = [cut.stop - cut.start for cut in part]
        lows = [max(-start, 0) for start in starts]
        highs = [max(min(size, n - start), low) for size, n, start, low in
                 zip(sizes, self.shape, starts, lows, strict=True)]  # fmt: skip
        inside = tuple(slice(low, high) for low, high in zip(lows, highs, strict=True))
        numbers = np.zeros((1,) * len(sizes), np.int64)
        for dim, (start, low, high, stride) in enumerate(zip(starts, lows, highs, self.strides, strict=True)):
            ways = [1] * len(sizes)
            ways[dim] = -1
            numbers = numbers + (np.arange(start + low, start + high) * stride).reshape(ways)
        if numbers.size and numbers.max() >= self.array.numbers.size:
            raise SimulationError(f"a TMA box at {starts} reaches past {self.array.name}")
        return inside, numbers


def async_load(tensor_desc: Descriptor, coord, barrier: Buffer, result: Buffer, pred=True, multicast=False) -> None:
    agent = machine.current()
    if not true(pred):
        return
    if result.shape != tensor_desc.block_shape or result.type is not tensor_desc.dtype:
        raise SimulationError(f"a box {tensor_desc.block_shape} is loaded into a buffer of {result.shape}")
    if unwrap(multicast) and agent.programs > 1 and agent.rank:
        return  # the first program loads for both
    ranks = list(range(agent.programs)) if unwrap(multicast) and agent.programs > 1 else [None]
    part = own_part(result.shape, halves_of(tensor_desc.layout, len(result.shape)))
    inside, numbers = tensor_desc.box(coord, part)
    undefined = tensor_desc.array.undefined(numbers)  # as of rows behind a group, which are loaded and not used
    started = []
    for rank in ranks:
        to = barrier_of(barrier, rank)
        access = Access(agent, "write", True, over=False, barrier=to)
        result.write(access, part, rank)
        started.append((access, to, result.view(part, rank)))

    def end():
        for access, to, into in started:
            into[...] = 0
            found = tensor_desc.array.numbers[numbers]
            found[undefined] = np.nan
            into[inside] = found
            access.phase = to.phase
            to.complete(tensor_desc.nbytes_per_cta)

    agent.machine.fly(end)
    agent.pause()


def async_store(tensor_desc: Descriptor, coord, src: Buffer) -> None:
    _store(tensor_desc, coord, src, add=False)


def async_atomic_add(tensor_desc: Descriptor, coord, src: Buffer) -> None:
    _store(tensor_desc, coord, src, add=True)


def _store(tensor_desc: Descriptor, coord, src: Buffer, add: bool) -> None:
    agent = machine.current()
    if src.shape != tensor_desc.block_shape or src.type is not tensor_desc.dtype:
        raise SimulationError(f"a box {tensor_desc.block_shape} is stored from a buffer of {src.shape}")
    part = own_part(src.shape, halves_of(tensor_desc.layout, len(src.shape)))
    inside, numbers = tensor_desc.box(coord, part)
    access = Access(agent, "read", True, over=False)
    src.read(access, part)
    view, into = src.view(part), tensor_desc.array.numbers
    tensor_desc.array.mark(numbers, by_tma=True)

    def end():
        into[numbers] = view[inside] + (into[numbers] if add else 0)

    agent.stores.append((access, end))
    agent.machine.fly(end)
    agent.pause()


def store_wait(pendings) -> None:
    """Until all but the last so many stores of this partition have read their buffers."""
    agent = machine.current()
    over = len(agent.stores) - operator.index(unwrap(pendings))
    for access, end in agent.stores[: max(over, 0)]:
        agent.machine.land(end)
        access.finish()
    del agent.stores[: max(over, 0)]


# cp.async


def copy_to_shared(smem: Buffer, pointer: Tensor, mask=None) -> None:
    """Masked elements become zeros."""
    agent, memory = machine.current(), machine.current().machine.memory
    if smem.shape != pointer.shape:
        raise SimulationError(f"pointers of {pointer.shape} copied into a buffer of {smem.shape}")
    chosen = np.broadcast_to(True if mask is None else to_tensor(mask).used(), pointer.data.shape)
    numbers = np.zeros(pointer.data.shape, smem.type.numpy)
    numbers[chosen] = memory.load(pointer.used()[chosen], smem.type, fresh=True)
    access = Access(agent, "write", False, over=False, barrier=_LATER)
    part = own_part(smem.shape, (False,) * len(smem.shape))
    smem.write(access, part)
    agent.copies.append((access, smem.view(part), numbers))


_LATER = object()  # the mbarrier of copies that have none yet


def mbarrier_arrive(mbarrier: Buffer, increment_count=True) -> None:
    """All threads arrive once their copies so far are complete."""
    agent, barrier = machine.current(), barrier_of(mbarrier)
    if unwrap(increment_count):
        raise SimulationError("mbarrier_arrive is simulated with increment_count=False only")
    copies, agent.copies = agent.copies, []
    for access, _, _ in copies:
        access.barrier = barrier

    def end():
        for access, into, numbers in copies:
            into[...] = numbers
            access.phase = barrier.phase
        barrier.arrive(agent, 32 * agent.warps, knowing=False)

    agent.machine.fly(end)
    agent.pause()


# wgmma


class Flight:
    """A wgmma that was started: reads its operands and its accumulator at any time until it is waited for. A may be in
    registers."""

    def __init__(self, a: Buffer | Tensor, b: Buffer, acc: Tensor, use_acc: bool):
        self.agent, self.where = machine.current(), machine.where()
        self.result = np.full(acc.data.shape, np.nan, np.float32)
        self.reads = []
        # In a cluster A's rows are divided as the accumulator's.
        whole = own_part(a.shape, (acc.halves[0], False)), own_part(b.shape, (False, False))
        for operand, part in zip((a, b), whole, strict=True):
            if isinstance(operand, Buffer):
                access = Access(self.agent, "read", True, over=False)
                operand.read(access, part)
                self.reads.append(access)
        left, right = a.used()[whole[0]] if isinstance(a, Tensor) else a.view(whole[0]), b.view(whole[1])
        rows, into = whole[0][0], self.result
        before = acc.data if use_acc else None

        def compute():
            with np.errstate(all="ignore"):
                product = left.astype(np.float32) @ right.astype(np.float32)
                into[rows] = product if before is None else before[rows] + product

        self.compute = compute
        self.computed = False

    def run(self) -> None:
        if not self.computed:
            self.computed = True
            self.compute()

    def finish(self) -> None:
        self.run()
        for read in self.reads:
            read.finish()


def warpgroup_mma(a: Buffer | Tensor, b: Buffer, acc: Tensor, *, use_acc=True, is_async=False) -> Tensor:
    agent, use_acc = machine.current(), true(use_acc)
    (m, k), (k2, n) = a.shape, b.shape
    if acc.shape != [m, n] or k != k2 or a.type.itemsize != b.type.itemsize:
        raise SimulationError(f"a wgmma of {a.shape} and {b.shape} into {acc.shape}")
    if use_acc and acc.flight is None:
        acc.used()
    if agent.warps != 4:
        raise SimulationError("a wgmma needs a warp group")
    flight = Flight(a, b, acc, use_acc)
    agent.wgmmas.append(flight)
    if not agent.machine.late and agent.machine.rng.random() < 0.5:
        for each in agent.wgmmas:
            each.run()
    found = Tensor(flight.result, acc.type, acc.halves, flight=flight)
    return found if unwrap(is_async) else warpgroup_mma_wait(0, deps=[found])


def warpgroup_mma_wait(num_outstanding=0, deps=()):
    """Until at most so many are in flight. The values that may be used from now on are the returned ones."""
    agent = machine.current()
    over = len(agent.wgmmas) - operator.index(unwrap(num_outstanding))
    for flight in agent.wgmmas[: max(over, 0)]:
        flight.finish()
    del agent.wgmmas[: max(over, 0)]
    found = []
    for dep in deps:
        flying = dep.flight is not None and dep.flight in agent.wgmmas
        found.append(Tensor(dep.data, dep.type, dep.halves, flight=dep.flight if flying else None))
    return found[0] if len(found) == 1 else tuple(found)
