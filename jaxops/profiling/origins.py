"""Which HLO instruction launched a kernel that runs inside a CUDA graph, where the profiler shows only the graph."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from jaxops.profiling.hlo import Module
from jaxops.profiling.trace import Event


def with_origins(
    events: Sequence[Event], steps: int, plain: Sequence[Event], module: Module | None, program: str
) -> list[Event]:
    """The events, with the instruction of each that a graph hides.

    The same program without graphs launches the same kernels in the same order, so the k-th launch of a kernel's name
    belongs to the instruction of its k-th launch there. Where there is no such run, or the numbers of launches differ,
    a kernel that has an instruction's name is that instruction's: XLA names its fusions so, but two equal fusions may
    share a kernel. Others keep no instruction.

    Args:
      events: of `steps` steps.
      plain: of one step of the same program without graphs.
      module: the program; None if unknown.
      program: its name.
    """
    known: dict[tuple[int, str], list[str]] = collections.defaultdict(list)
    for event in plain:
        if event.program == program and event.op:
            known[event.device, event.name].append(event.op)
    hidden: dict[tuple[int, str], int] = collections.Counter(
        (event.device, event.name) for event in events if event.program == program and not event.op
    )
    numbers: dict[tuple[int, str], itertools.count] = collections.defaultdict(itertools.count)
    by_kernel = {} if module is None else {name.replace(".", "_"): name for name in module.launched}
    found = []
    for event in events:
        if event.program == program and not event.op:
            key = event.device, event.name
            number, ops = next(numbers[key]), known[key]
            op = by_kernel.get(event.name, "")
            if len(ops) * steps == hidden[key]:
                op = ops[number % len(ops)]
            elif len(set(ops)) == 1:
                op = ops[0]
            event = dataclasses.replace(event, op=op)
        found.append(event)
    return found
