"""XLA's own record of a program's temporaries: the heap simulator's trace in its `BufferAssignmentProto`.

Field numbers are those of xla/service/hlo.proto. `memory_analysis()` has a CPU's record, which has no trace. Through
PJRT's C interface, as on GPUs, it may have none, but XLA writes it into every profile.
"""

import dataclasses
import pathlib
import tempfile

import jax

from jaxops.profiling.hlo import Module
from jaxops.profiling.protobuf_wire import Fields, WireError, fields, number, numbers, text, texts

_ALLOC, _FREE, _SHARE = 0, 1, 2
_HOST = 5  # memory space


@dataclasses.dataclass(frozen=True)
class Held:
    """Memory of a temporary that lives at the peak, with the instructions and arrays that it holds in turn."""

    bytes: int
    places: tuple[tuple[str, int], ...]


def live_at_peak(assignment: bytes) -> list[Held] | None:
    """The device's temporaries at the first moment at which they have most bytes; None if the record has no trace.

    Raises:
      WireError: the bytes are no BufferAssignmentProto, or its trace names unknown buffers.
    """
    record = fields(assignment)
    traces = [fields(trace) for trace in texts(record, 4)]
    values = {number(value, 1): value for value in map(fields, texts(record, 1))}
    if not any(1 in trace for trace in traces):
        return None
    return [held for trace in traces for held in _peak(trace, values)]


def _peak(trace: Fields, values: dict[int, Fields]) -> list[Held]:
    """Replays the trace. A value may share the memory of another one that was freed just before."""
    events = [fields(event) for event in texts(trace, 1)]
    memory: dict[int, int] = {}  # of a value: that whose memory it has
    users: dict[int, int] = {}  # of such a memory: values that live in it
    total, most, live = 0, 0, frozenset()
    for event in events:
        kind, value = number(event, 1), number(event, 2)
        if value not in values:
            raise WireError(f"the trace names the buffer {value}, which is not among the buffers.")
        if kind == _ALLOC:
            memory[value] = value
        elif kind == _SHARE:
            memory[value] = memory.get(number(event, 5), number(event, 5))
        of = memory.get(value)
        if of is None or of not in values:
            raise WireError(f"the trace frees or shares the buffer {value} before it is there.")
        before = users.get(of, 0)
        users[of] = before - 1 if kind == _FREE else before + 1
        if not before or not users[of]:
            total += _device_bytes(values[of]) if not before else -_device_bytes(values[of])
        if total > most:
            most, live = total, frozenset(each for each, count in users.items() if count > 0)
    places: dict[int, list[tuple[str, int]]] = {}
    for event in events:
        if number(event, 1) != _FREE and memory[number(event, 2)] in live:
            where = numbers(fields((texts(values[number(event, 2)], 3) or [b""])[0]), 3)
            places.setdefault(memory[number(event, 2)], []).append((text(event, 4), where[-1] if where else 0))
    return [Held(_device_bytes(values[of]), tuple(places[of])) for of in live if _device_bytes(values[of])]


def _device_bytes(value: Fields) -> int:
    return 0 if number(value, 4) == _HOST else number(value, 2)


def from_profile(module: Module) -> bytes:
    """The record of a loaded program, from a profile in which nothing runs; empty if it is not there."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder, profiler_options=options):
                pass
        except RuntimeError:  # the profiler is in use, or is not there
            return b""
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            if found := in_profile(file.read_bytes(), module):
                return found
    return b""


def in_profile(space: bytes, module: Module) -> bytes:
    """The record in an XPlane file (tsl/profiler/protobuf/xplane.proto) of the program with the module's entry."""
    entry = set(module.computations.get(module.entry, ()))
    for plane in map(fields, texts(fields(space), 1)):
        if text(plane, 2) != "/host:metadata":
            continue
        for metadata in (fields(texts(fields(each), 2)[-1]) for each in texts(plane, 4)):
            if text(metadata, 2).partition("(")[0] != module.name:
                continue
            for program in (found for stat in texts(metadata, 5) for found in texts(fields(stat), 6)):
                parts = fields(program)
                if 1 in parts and 3 in parts and _entry_names(fields(texts(parts, 1)[0])) == entry:
                    return texts(parts, 3)[0]
    return b""


def _entry_names(module: Fields) -> set[str]:
    for computation in map(fields, texts(module, 3)):
        if number(computation, 5) == number(module, 6):
            return {text(fields(each), 1) for each in texts(computation, 2)}
    return set()
