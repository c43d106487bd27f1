"""From a recording to a report."""

import collections
import dataclasses
import datetime
import functools
import json
from collections.abc import Iterable
from typing import Any

import jax

from jaxops.profiling import trace
from jaxops.profiling.costs import Cost, cost_of
from jaxops.profiling.hlo import Instruction, Module, parse
from jaxops.profiling.machine import Ceilings, ceilings
from jaxops.profiling.memory import memory_of
from jaxops.profiling.origins import with_origins
from jaxops.profiling.report import Kernel, Report
from jaxops.profiling.scopes import Scope, scope_of
from jaxops.profiling.trace import Event

_ENOUGH = 0.95  # of the kernels' time


@dataclasses.dataclass
class Recording:
    """What a profiled step leaves, filled call by call.

    Attributes:
      steps: in events.
      events: of the recorded steps.
      plain: of one step without CUDA graphs; empty if there was none.
      step_us, profiled_us: a step's time without and with the profiler.
      compiled, jaxpr: the step's program, as from `jax.jit(f).lower(...).compile()`; None if unknown.
      complete: no call is missing.
    """

    steps: int
    events: list[Event] = dataclasses.field(default_factory=list)
    plain: list[Event] = dataclasses.field(default_factory=list)
    step_us: float = 0.0
    profiled_us: float = 0.0
    compiled: Any = None
    jaxpr: Any = None
    complete: bool = False

    @property
    def hidden(self) -> bool:
        """Whether some kernel's instruction is unknown."""
        return any(event.program and not event.op for event in self.events)


def build(recording: Recording) -> Report:
    """The report of a complete recording."""
    device = jax.local_devices()[0]
    module = None if recording.compiled is None else parse(recording.compiled.as_text())
    program = _largest(recording.events) if module is None else module.name
    modules = _other_modules({event.program for event in recording.events} - {program, ""})
    if module is None:
        modules |= _other_modules({program})
    else:
        modules[program] = module
    events = with_origins(recording.events, recording.steps, recording.plain, modules.get(program), program)
    count = max(1, len({event.device for event in events}))
    known = ceilings()
    kernels = _kernels(events, modules, recording.steps * count, known)
    each = 1 / recording.steps / count
    report = Report(
        program=program,
        device=device.device_kind,
        devices=count,
        steps=recording.steps,
        step_us=recording.step_us,
        profiled_us=recording.profiled_us,
        busy_us=each * sum(trace.union_us(own) for own in _by_device(events)),
        exposed_communication_us=each * _exposed(events, "communication"),
        exposed_copies_us=each * _exposed(events, "copy to host", "copy to device"),
        kernels=kernels,
        ceilings=_plain(known.to_dict()),
        memory=None if recording.compiled is None else _plain(memory_of(recording.compiled, recording.jaxpr).to_dict()),
        made={"jax": jax.__version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat()},
        events=tuple(events),
    )
    return dataclasses.replace(report, notes=tuple(_notes(report, device.platform)))


def _plain(found: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(found))


def _largest(events: Iterable[Event]) -> str:
    """The program with most of the time."""
    totals: dict[str, float] = collections.defaultdict(float)
    for event in events:
        totals[event.program] += event.us
    totals.pop("", None)
    return max(totals, key=lambda name: totals[name], default="")


def _by_device(events: Iterable[Event]) -> list[list[Event]]:
    found: dict[int, list[Event]] = collections.defaultdict(list)
    for event in events:
        found[event.device].append(event)
    return list(found.values())


def _exposed(events: Iterable[Event], *kinds: str) -> float:
    return sum(
        trace.exposed_us((e for e in own if e.kind in kinds), (e for e in own if e.kind not in kinds))
        for own in _by_device(events)
    )


def _other_modules(programs: set[str]) -> dict[str, Module]:
    """Programs of this process by name; none of which there are several that differ."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for executable in jax.local_devices()[0].client.live_executables() if programs else ():
        for module in executable.hlo_modules():
            if module.name in programs:
                found[module.name].append(module.to_string())
    return {name: parse(texts[0]) for name, texts in found.items() if len(set(texts)) == 1}


def _kernels(events: list[Event], modules: dict[str, Module], steps: int, known: Ceilings) -> tuple[Kernel, ...]:
    """A row for each kernel of each instruction, the longest first. An instruction's cost is its longest kernel's."""
    counts: dict[tuple[str, str, str, str], list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for event in events:
        found = counts[event.program, event.op, event.name, event.kind]
        found[0] += 1
        found[1] += event.us
    rows: list[Kernel] = []
    seen: set[tuple[str, str]] = set()
    for (program, op, name, kind), (calls, us) in sorted(counts.items(), key=lambda item: -item[1][1]):
        module = modules.get(program)
        found = module.instructions.get(op) if module is not None else None
        if found is None or module is None:
            scope, cost = Scope(), Cost(None, None)
        else:
            scope = _scope(found[0], module)
            cost = cost_of(op, module) if (program, op) not in seen else Cost(0, 0)
        if op:
            seen.add((program, op))
        calls, us = calls / steps, us / steps
        flops, moved = (None if each is None else each * calls for each in (cost.flops, cost.bytes))
        least, needs = _least(flops, moved, cost.dtype, known) if kind == "kernel" else (None, None)
        rows.append(
            Kernel(
                name,
                kind,
                program,
                op,
                str(scope),
                scope.primitive,
                scope.stage,
                calls,
                us,
                flops,
                moved,
                cost.dtype,
                least,
                needs,
            )
        )
    return tuple(rows)


def _least(flops: float | None, moved: float | None, dtype: str | None, known: Ceilings) -> tuple[float | None, Any]:
    """Microseconds at the ceilings, and the one that binds; None if the bytes are unknown."""
    if moved is None:
        return None, None
    rate = known.product_tflops(dtype) if dtype is not None else None
    times = {"memory": moved / (known.copy_gbps * 1e3)}
    if flops and rate:
        times["tensor cores"] = flops / (rate * 1e6)
    needs = max(times, key=lambda name: times[name])
    return times[needs], needs


@functools.lru_cache(maxsize=10_000)
def _scope_in(op_name: str, inner: tuple[str, ...]) -> Scope:
    own = scope_of(op_name)
    if own.path:
        return own
    # XLA dropped a fusion's path, or merged several: the commonest one inside.
    common = collections.Counter(scope for scope in map(scope_of, inner) if scope.path)
    return common.most_common(1)[0][0] if common else own


def _scope(found: Instruction, module: Module) -> Scope:
    inner = tuple(
        each.op_name for name in found.calls for each in module.computations.get(name, {}).values() if each.op_name
    )
    return _scope_in(found.op_name, inner)


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
    if report.accounted < _ENOUGH:
        yield (
            f"The instruction that launched them is known for {report.accounted:.0%} of the kernels' time: CUDA graphs "
            "hide it, and the step is no jitted function, or has static arguments. Other kernels have a name only."
        )
    unknown = sum(each.us for each in report.kernels if each.kind == "kernel" and each.bytes is None)
    without = sum(each.us for each in report.kernels if each.kind == "kernel" and each.flops is None)
    if max(unknown, without) > 0.005 * report.kernels_us:
        share = max(unknown, without) / report.kernels_us
        yield f"FLOPs or bytes are unknown for {share:.1%} of the kernels' time (custom calls that state none)."
    if report.profiled_us > 1.1 * report.step_us:
        yield (
            f"With the profiler a step took {report.profiled_us / 1e3:.2f} ms, without {report.step_us / 1e3:.2f} ms; "
            "idle time is that without it."
        )
