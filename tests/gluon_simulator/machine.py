"""Who runs: the partitions of all programs as threads of which one runs at a time, in an order that a seed decides.

What happened before what is kept in vector clocks. Each partition counts its own releases; its clock holds the last
count of each other partition, and the last phase of each mbarrier, that it knows to be over. Whoever arrives at an
mbarrier gives it its clock, whoever waits takes it. `published` is the part of the clock that a proxy fence has shown
to TMA and the tensor core (PTX manual, "Async proxy").
"""

import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np


class SimulationError(Exception):
    """What would be undefined, or wrong, on the card."""


class _Stopped(BaseException):
    """Ends the other partitions after an error."""


_local = threading.local()


def current() -> "Agent":
    """The partition that runs now."""
    return _local.agent


def where() -> str:
    """The line of the kernel that runs now."""
    frame = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code):
        frame = frame.f_back
    return "?" if frame is None else _line(frame.f_code, frame.f_lineno)


def _is_ours(code: types.CodeType) -> bool:
    folder, _, file = code.co_filename.rpartition("/")
    return folder.endswith("gluon_simulator") and not file.startswith("test_")


def _line(code: types.CodeType, number: int) -> str:
    return f"{code.co_filename.rpartition('/')[2]}:{number} in {code.co_name}"


class Agent:
    """A partition of a program, by convention one warp group.

    rank: which of a cluster's programs it belongs to. programs: how many a cluster has.
    """

    def __init__(self, machine: "Machine", name: str, program: "Program", warps: int, parent: "Agent | None" = None):
        self.machine, self.name, self.program, self.warps = machine, name, program, warps
        self.rank, self.programs = program.rank, machine.programs
        self.index = machine.new_clock()
        self.clock = parent.clock.copy() if parent else np.zeros(machine.capacity, np.int64)
        self.published = parent.published.copy() if parent else np.zeros(machine.capacity, np.int64)
        self.clock[self.index] = 1
        self.turn = threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        self.ready: Callable[[], bool] | None = None
        self.waits_at = ""
        self.finished = False
        self.waits = 0
        self.stored = False  # by all threads, in global memory, since their last barrier
        self.wgmmas: list = []  # in flight, the oldest first
        self.stores: list = []  # by TMA, in flight
        self.copies: list = []  # cp.async, in flight
        self.unfinished: list = []  # loads from shared memory whose values were not used yet

    @property
    def time(self) -> int:
        return int(self.clock[self.index])

    def release(self) -> tuple[np.ndarray, np.ndarray]:
        """What others may know from now on. Later accesses are newer than that."""
        given = self.clock.copy(), self.published.copy()
        self.clock[self.index] += 1
        return given

    def acquire(self, clock: np.ndarray, published: np.ndarray) -> None:
        np.maximum(self.clock, clock, out=self.clock)
        np.maximum(self.published, published, out=self.published)

    def fence(self) -> None:
        """fence.proxy.async: memory accesses before it are over, and TMA and the tensor core see them."""
        for read in self.unfinished:
            read.finish()
        self.unfinished.clear()
        np.maximum(self.published, self.clock, out=self.published)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Lets others run until ready()."""
        self.waits_at = where()
        self.ready = ready
        self.machine.switch(self)
        self.ready = None

    def pause(self) -> None:
        """Others may run."""
        if self.machine.rng.random() < self.machine.restless:
            self.machine.switch(self)

    def meet_cluster(self) -> None:
        """Waits until all programs of the cluster have come here as often."""
        programs = self.program.cluster
        self.program.meetings += 1
        number = self.program.meetings
        self.program.brought = self.release()
        self.wait(lambda: all(program.meetings >= number for program in programs))
        for program in programs:
            self.acquire(*program.brought)

    def __str__(self):
        return f"{self.name} of program {self.program.number}" + f", {self.rank}" * (self.programs > 1)


class Program:
    """One program of a launch; in a cluster, one of its two.

    shared: its shared memory, in the order of allocation. barriers: by allocation and place in it.
    """

    def __init__(self, number: int, rank: int, cluster: list["Program"]):
        self.number, self.rank, self.cluster = number, rank, cluster
        self.shared: list = []
        self.barriers: dict = {}
        self.shared_bytes = 0
        self.meetings, self.brought = 0, ()
        self.ended = False

    def end(self) -> None:
        """Its shared memory is gone: nobody of the cluster may still arrive at its mbarriers."""
        agent = current()
        self.ended = True
        for barrier in self.barriers.values():
            if any(agent.clock[index] < time for index, time in barrier.remote.items()):
                raise SimulationError("a program ends, and nothing says that the cluster's other one no longer arrives")


class Machine:
    """One launch.

    memory: `memory.Memory`, the arrays.
    late: asynchronous operations end only when everybody waits, or when the program waits for them; otherwise at any
    time.
    """

    def __init__(self, memory: Any, grid: int, programs: int, seed: int):
        self.memory, self.grid, self.programs = memory, grid, programs
        self.rng = random.Random(seed)
        self.late = seed % 3 == 0
        self.restless = (0.0, 0.3, 0.05)[seed % 3]
        self.capacity = grid * programs * 72 + 8
        self.clocks = 0
        self.agents: list[Agent] = []
        self.flying: list[Callable[[], None]] = []  # what the hardware does beside the programs
        self.error: BaseException | None = None
        self.idle = threading.Semaphore(0)
        self.turn = -1  # of whom it was last
        self.accesses: list = [None]
        self.atomics: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # clocks that atomics have released, by address

    def new_clock(self) -> int:
        self.clocks += 1
        if self.clocks > self.capacity:
            raise SimulationError("more partitions and mbarriers than the simulator has clocks for")
        return self.clocks - 1

    def fly(self, end: Callable[[], None]) -> None:
        """Starts something asynchronous, that `end` completes."""
        if not self.late and self.rng.random() < 0.3:
            end()
        else:
            self.flying.append(end)

    def land(self, end: Callable[[], None]) -> None:
        """Completes it now, if it is not complete."""
        if end in self.flying:
            self.flying.remove(end)
            end()

    def start(self, agent: Agent, run: Callable[[], Any]) -> None:
        def body():
            agent.turn.acquire()
            _local.agent = agent
            try:
                if self.error is None:
                    run()
            except _Stopped:
                pass
            except BaseException as error:  # of the kernel: told where the launch was made
                if self.error is None:
                    error.add_note(f"in {agent}, {where_of(error)}")
                    self.error = error
            agent.finished = True
            self.hand_on()

        self.agents.append(agent)
        agent.thread = threading.Thread(target=body, daemon=True)
        agent.thread.start()

    def next(self) -> Agent | None:
        """Who runs now; None if all have ended."""
        alive = [agent for agent in self.agents if not agent.finished]
        if self.error is not None:
            return alive[0] if alive else None
        while alive:
            ready = [agent for agent in alive if agent.ready is None or agent.ready()]
            if self.flying and (not ready or (not self.late and self.rng.random() < 0.3)):
                self.flying.pop(0 if self.late else self.rng.randrange(len(self.flying)))()
                continue
            if not ready:
                lines = "; ".join(f"{agent} waits at {agent.waits_at}" for agent in alive)
                self.error = SimulationError(f"deadlock: {lines}")
                return alive[0]
            if not self.late:
                return self.rng.choice(ready)
            chosen = next((agent for agent in ready if agent.index > self.turn), ready[0])
            self.turn = chosen.index
            return chosen
        return None

    def hand_on(self) -> None:
        chosen = self.next()
        (self.idle if chosen is None else chosen.turn).release()

    def switch(self, agent: Agent) -> None:
        chosen = self.next()
        if chosen is not agent:
            (self.idle if chosen is None else chosen.turn).release()
            agent.turn.acquire()
        if self.error is not None:
            raise _Stopped

    def run(self, kernel: Callable[[], Any]) -> None:
        """Runs it for each program of the grid, and raises the first error."""
        for number in range(self.grid):
            cluster: list[Program] = []
            cluster += [Program(number, rank, cluster) for rank in range(self.programs)]
            for program in cluster:
                self.start(Agent(self, "kernel", program, 4), lambda program=program: (kernel(), program.end()))
        self.hand_on()
        self.idle.acquire()
        for agent in self.agents:
            assert agent.thread is not None
            agent.thread.join()
        if self.error is not None:
            raise self.error
        while self.flying:
            self.flying.pop(0)()

    def specialize(self, partitions: list[tuple[Callable, tuple]], warps: list[int]) -> None:
        """gl.warp_specialize: runs the partitions beside each other, and returns when all have ended."""
        parent = current()
        parent.meet_cluster()  # Triton's barrier after the mbarriers are initialized
        children = []
        for i, (function, args) in enumerate(partitions):
            name = f"{getattr(function, '__name__', 'partition')} {i}"
            child = Agent(self, name, parent.program, 4 if i == 0 else warps[i - 1], parent)
            children.append(child)
            self.start(child, lambda function=function, args=args: self._partition(function, args))
        parent.clock[parent.index] += 1
        parent.wait(lambda: all(child.finished for child in children))
        for child in children:
            parent.acquire(child.clock, child.published)

    @staticmethod
    def _partition(function: Callable, args: tuple) -> None:
        function(*args)
        if current().stores or current().wgmmas:
            raise SimulationError("a partition ends while TMA or the tensor core reads its shared memory")


def where_of(error: BaseException) -> str:
    """The innermost line of a kernel in an error's traceback."""
    trace, found = error.__traceback__, "?"
    while trace is not None:
        if not _is_ours(trace.tb_frame.f_code):
            found = _line(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return found
