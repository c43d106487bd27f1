"""From a recording to a report."""

import collections
import dataclasses
import datetime
from collections.abc import Iterable
from typing import Any

import jax

from jaxops._lib.hlo import Module, module_of
from jaxops.profiling import trace
from jaxops.profiling.costs import Cost, cost_of
from jaxops.profiling.machine import Ceilings
from jaxops.profiling.memory import memory_of
from jaxops.profiling.report import Kernel, Report
from jaxops.profiling.scopes import Scope, scopes_of
from jaxops.profiling.trace import Event

_ENOUGH = 0.95  # of the kernels' time


@dataclasses.dataclass(frozen=True)
class Recording:
    """What a profiled step leaves.

    Attributes:
      steps: in events.
      events: of the recorded steps.
      step_us, profiled_us: a step's time without and with the profiler.
      program: the step's name.
      programs: all of this process that ran, by name; of a name that several different ones have, none.
    """

    steps: int
    events: list[Event]
    step_us: float
    profiled_us: float
    program: str
    programs: dict[str, Any] = dataclasses.field(default_factory=dict)


def largest_program(events: Iterable[Event]) -> str:
    """The program with most of the time; empty if there is none."""
    totals: dict[str, float] = collections.defaultdict(float)
    for event in events:
        totals[event.program] += event.us
    totals.pop("", None)
    return max(totals, key=lambda name: totals[name], default="")


def programs_of(events: Iterable[Event]) -> dict[str, Any]:
    """See `Recording.programs`."""
    names = {event.program for event in events} - {""}
    alike: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for executable in jax.local_devices()[0].client.live_executables() if names else ():
        for module in executable.hlo_modules():
            if module.name in names:
                alike[module.name][module.to_string()] = executable
    return {name: next(iter(each.values())) for name, each in alike.items() if len(each) == 1}


def build(recording: Recording, known: Ceilings | None) -> Report:
    """The report of a recording, with the card's ceilings if they are known."""
    device, steps = jax.local_devices()[0], recording.steps
    modules = {name: module_of(each) for name, each in recording.programs.items()}
    by_device: dict[int, list[Event]] = collections.defaultdict(list)
    # Where a CUDA graph hides the instruction that launched a kernel: the one that the kernel is named after, as XLA
    # names its fusions. Two equal fusions may share a kernel.
    named = {name: {op.replace(".", "_"): op for op in module.instructions} for name, module in modules.items()}
    for event in recording.events:
        op = event.op or named.get(event.program, {}).get(event.name, "")
        by_device[event.device].append(dataclasses.replace(event, op=op))
    count = max(1, len(by_device))
    executable = recording.programs.get(recording.program)

    def exposed_us(*kinds: str) -> float:
        alone = (
            trace.exposed_us((e for e in own if e.kind in kinds), (e for e in own if e.kind not in kinds))
            for own in by_device.values()
        )
        return sum(alone) / steps / count

    report = Report(
        program=recording.program,
        device=device.device_kind,
        devices=count,
        steps=steps,
        step_us=recording.step_us,
        profiled_us=recording.profiled_us,
        busy_us=sum(map(trace.union_us, by_device.values())) / steps / count,
        exposed_communication_us=exposed_us("communication"),
        exposed_copies_us=exposed_us("copy to host", "copy to device"),
        kernels=_kernels([event for own in by_device.values() for event in own], modules, steps * count, known),
        ceilings=known,
        memory=None if executable is None else memory_of(executable),
        made={"jax": jax.__version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat()},
    )
    return dataclasses.replace(report, notes=tuple(_notes(report, device.platform)))


def _kernels(events: list[Event], modules: dict[str, Module], steps: int, known: Ceilings | None) -> tuple[Kernel, ...]:
    """A row for each kernel of each instruction, the longest first. An instruction's cost is its longest kernel's."""
    launches: dict[tuple[str, str, str, str], list[float]] = collections.defaultdict(list)
    for event in events:
        launches[event.program, event.op, event.name, event.kind].append(event.us)
    rows: list[Kernel] = []
    counted: set[tuple[str, str]] = set()
    scopes = {name: scopes_of(module) for name, module in modules.items()}
    for (program, op, name, kind), times in sorted(launches.items(), key=lambda item: -sum(item[1])):
        scope, cost, calls = Scope(), Cost(None, None), len(times) / steps
        if program in modules and op in modules[program].instructions:
            module = modules[program]
            scope = scopes[program](module.instructions[op])
            cost = cost_of(module.instructions[op], module) if (program, op) not in counted else Cost(0, 0)
            counted.add((program, op))
        flops, moved = (None if each is None else each * calls for each in (cost.flops, cost.bytes))
        least_us, needs = None, None
        if kind == "kernel" and moved is not None and known is not None:
            least_us, needs = known.floor(flops or 0, moved, cost.dtype)
        rows.append(
            Kernel(
                name, kind, program, op, str(scope), scope.primitive, scope.stage, calls, sum(times) / steps,
                flops, moved, cost.dtype, least_us, needs,
            )
        )  # fmt: skip
    return tuple(rows)


def _notes(report: Report, platform: str) -> Iterable[str]:
    """What the report cannot know, and why."""
    if platform == "cpu":
        yield (
            "This is a CPU: rows are XLA's operations on all its threads, ceilings are wall times of small products "
            "and copies, and nothing here says how long a GPU would take. Pallas' kernels run in an interpreter."
        )
    if not report.kernels:
        yield "The profiler saw nothing run on a device."
        return
    if report.ceilings is None:
        yield "The card's ceilings are unknown: measure them with `python -m jaxops.profiling ceilings`."
    if report.accounted < _ENOUGH:
        yield (
            f"The instruction that launched them is known for {report.accounted:.0%} of the kernels' time: CUDA graphs "
            "hide it. Other kernels have a name only. `run --without-graphs` shows all of them."
        )
    unknown = sum(each.us for each in report.kernels if each.kind == "kernel" and None in (each.flops, each.bytes))
    if unknown > 0.005 * report.kernels_us:
        share = unknown / report.kernels_us
        yield f"FLOPs or bytes are unknown for {share:.1%} of the kernels' time (custom calls that state none)."
    if report.profiled_us > 1.1 * report.step_us:
        yield (
            f"With the profiler a step took {report.profiled_us / 1e3:.2f} ms, without {report.step_us / 1e3:.2f} ms; "
            "idle time is that without it."
        )
