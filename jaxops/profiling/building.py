"""From a recording to a report."""

import collections
import dataclasses
import datetime
import json
from collections.abc import Iterable
from typing import Any, Literal

import jax

from jaxops.profiling import hlo, trace
from jaxops.profiling.costs import Cost, cost_of
from jaxops.profiling.machine import Ceilings
from jaxops.profiling.memory import memory_of
from jaxops.profiling.origins import with_origins
from jaxops.profiling.report import Kernel, Report
from jaxops.profiling.scopes import Scope
from jaxops.profiling.trace import Event

_ENOUGH = 0.95  # of the kernels' time


@dataclasses.dataclass
class Recording:
    """What a profiled step leaves.

    Attributes:
      steps: in events.
      events: of the recorded steps.
      plain: of one step without CUDA graphs; empty if there was none.
      step_us, profiled_us: a step's time without and with the profiler.
      executable: the step's program; None if unknown.
      step_program: its name, where that is known; else the program with most of the time is the step's.
      programs: all that ran, by name; see `find_programs`.
      complete: no call is missing.
    """

    steps: int
    events: list[Event] = dataclasses.field(default_factory=list)
    plain: list[Event] = dataclasses.field(default_factory=list)
    step_us: float = 0.0
    profiled_us: float = 0.0
    executable: Any = None
    step_program: str = ""
    programs: dict[str, Any] = dataclasses.field(default_factory=dict)
    complete: bool = False

    @property
    def hidden(self) -> bool:
        """Whether some kernel's instruction is unknown."""
        return any(event.program and not event.op for event in self.events)

    @property
    def program(self) -> str:
        """The step's name."""
        if self.executable is not None:
            return self.executable.hlo_modules()[0].name
        return self.step_program or largest_program(self.events)

    def find_programs(self) -> None:
        """Keeps the programs of this process that ran; of a name that several different ones have, none."""
        alike: dict[str, dict[str, Any]] = collections.defaultdict(dict)
        names = {event.program for event in self.events} - {""}
        for executable in jax.local_devices()[0].client.live_executables() if names else ():
            for module in executable.hlo_modules():
                if module.name in names:
                    alike[module.name][module.to_string()] = executable
        self.programs = {name: next(iter(each.values())) for name, each in alike.items() if len(each) == 1}
        if self.executable is not None:
            self.programs[self.program] = self.executable


def largest_program(events: Iterable[Event]) -> str:
    """The program with most of the time; empty if there is none."""
    totals: dict[str, float] = collections.defaultdict(float)
    for event in events:
        totals[event.program] += event.us
    totals.pop("", None)
    return max(totals, key=lambda name: totals[name], default="")


def build(recording: Recording, known: Ceilings | None) -> Report:
    """The report of a complete recording, with the card's ceilings if they are known."""
    device = jax.local_devices()[0]
    program = recording.program
    modules = {name: hlo.parse(each.hlo_modules()[0].to_string()) for name, each in recording.programs.items()}
    events = with_origins(recording.events, recording.steps, recording.plain, modules.get(program), program)
    by_device: dict[int, list[Event]] = collections.defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
    count = max(1, len(by_device))
    executable = recording.programs.get(program)

    def exposed_us(*kinds: str) -> float:
        alone = (
            trace.exposed_us((e for e in own if e.kind in kinds), (e for e in own if e.kind not in kinds))
            for own in by_device.values()
        )
        return sum(alone) / recording.steps / count

    report = Report(
        program=program,
        device=device.device_kind,
        devices=count,
        steps=recording.steps,
        step_us=recording.step_us,
        profiled_us=recording.profiled_us,
        busy_us=sum(map(trace.union_us, by_device.values())) / recording.steps / count,
        exposed_communication_us=exposed_us("communication"),
        exposed_copies_us=exposed_us("copy to host", "copy to device"),
        kernels=_kernels(events, modules, recording.steps * count, known),
        ceilings=None if known is None else json.loads(json.dumps(known.to_dict())),
        memory=None if executable is None else json.loads(json.dumps(memory_of(executable).to_dict())),
        made={"jax": jax.__version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat()},
    )
    return dataclasses.replace(report, notes=tuple(_notes(report, device.platform)))


def _kernels(
    events: list[Event], modules: dict[str, hlo.Module], steps: int, known: Ceilings | None
) -> tuple[Kernel, ...]:
    """A row for each kernel of each instruction, the longest first. An instruction's cost is its longest kernel's."""
    launches: dict[tuple[str, str, str, str], list[float]] = collections.defaultdict(list)
    for event in events:
        launches[event.program, event.op, event.name, event.kind].append(event.us)
    rows: list[Kernel] = []
    counted: set[tuple[str, str]] = set()
    for (program, op, name, kind), times in sorted(launches.items(), key=lambda item: -sum(item[1])):
        module = modules.get(program)
        scope, cost = Scope(), Cost(None, None)
        if module is not None and op in module.instructions:
            scope = hlo.scope_in(module.instructions[op][0], module)
            cost = cost_of(op, module) if (program, op) not in counted else Cost(0, 0)
            counted.add((program, op))
        calls = len(times) / steps
        flops, moved = (None if each is None else each * calls for each in (cost.flops, cost.bytes))
        least, needs = _least(flops, moved, cost.dtype, known) if kind == "kernel" else (None, None)
        rows.append(
            Kernel(
                name=name,
                kind=kind,
                program=program,
                op=op,
                scope=str(scope),
                primitive=scope.primitive,
                stage=scope.stage,
                calls=calls,
                us=sum(times) / steps,
                flops=flops,
                bytes=moved,
                dtype=cost.dtype,
                least_us=least,
                needs=needs,
            )
        )
    return tuple(rows)


def _least(
    flops: float | None, moved: float | None, dtype: str | None, known: Ceilings | None
) -> tuple[float | None, Literal["tensor cores", "memory"] | None]:
    """Microseconds at the ceilings, and the one that binds; None if the bytes are unknown."""
    if moved is None or known is None:
        return None, None
    rate = known.product_tflops(dtype) if dtype is not None else None
    memory_us = moved / (known.copy_gbps * 1e3)
    products_us = flops / (rate * 1e6) if flops and rate else 0.0
    return (products_us, "tensor cores") if products_us > memory_us else (memory_us, "memory")


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
