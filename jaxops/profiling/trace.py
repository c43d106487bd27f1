"""What ran on the devices while some calls were made: kernels, copies and collectives, from JAX's profiler."""

import contextlib
import dataclasses
import math
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import jax

Kind = Literal["kernel", "communication", "copy on device", "copy to host", "copy to device", "fill"]
_LOOPS = re.compile(r"(while|call|conditional)(\.\d+)?")  # on a CPU an event of theirs contains the body's
_LAUNCH = re.compile(r"PjitFunction\((.*)\)")
# P2P: a collective by the cards' copy engines.
_COPIES: dict[str, Kind] = {"D2H": "copy to host", "H2D": "copy to device", "P2P": "communication"}


_profilers = {"started": False}  # of this process: see `device_times_us`


def has_recorded() -> bool:
    """Whether `recorded` has been used in this process."""
    return _profilers["started"]


class ProfilerBusy(RuntimeError):
    """Another profile is being recorded."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel, copy or fill on a device.

    Attributes:
      name: the kernel's.
      start_us, us: from an arbitrary zero; both are the device's clock.
      device: its number.
      stream: its name.
      program: name of the compiled program, such as "jit_step"; empty for what none launched.
      op: the HLO instruction; empty where a CUDA graph hides it.
    """

    name: str
    start_us: float
    us: float
    device: int
    stream: str
    program: str = ""
    op: str = ""

    @property
    def end_us(self) -> float:
        return self.start_us + self.us

    @property
    def kind(self) -> Kind:
        return kind_of(self.name)


def kind_of(name: str) -> Kind:
    """Of the kernel or copy of that name."""
    if name.lower().startswith("memcpy"):
        return _COPIES.get(name[6:9], "copy on device")
    if name.lower().startswith("memset"):
        return "fill"
    return "communication" if "nccl" in name.lower() else "kernel"


@contextlib.contextmanager
def recording(folder: str | pathlib.Path) -> Iterator[None]:
    """`jax.profiler` writes what happens inside to the folder, without Python's own calls.

    Raises:
      ProfilerBusy: `jax.profiler` records already.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls cost more than the step's kernels
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        raise ProfilerBusy(f"jax.profiler records a profile already: end it first ({error}).") from error
    _profilers["started"] = True
    try:
        yield
    finally:
        jax.profiler.stop_trace()


@contextlib.contextmanager
def recorded() -> Iterator[list[Event]]:
    """Fills the list, at the end, with what ran on the devices inside, in order; on a CPU with XLA's operations.

    Wait inside for the results that shall be part of it.

    Raises:
      ProfilerBusy: `jax.profiler` records already.
    """
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        with recording(folder):
            yield events
        events += read(folder)[0]


class Launch(NamedTuple):
    """A step's begin on the host.

    Attributes:
      name: of the jitted function, or of a `jax.profiler.StepTraceAnnotation`.
      start_us: on the host's clock.
      is_annotation: which of them.
    """

    name: str
    start_us: float
    is_annotation: bool


def read(folder: str | pathlib.Path) -> tuple[list[Event], list[Launch]]:
    """What ran on the devices, and the host's launches, in order, of the XPlane files in a folder."""
    events: list[Event] = []
    launches: list[Launch] = []
    for file in pathlib.Path(folder).rglob("*.xplane.pb"):
        with warnings.catch_warnings():
            # jaxlib 0.12 makes its types with a warning about itself; as an error it would end the process.
            warnings.filterwarnings("ignore", "builtin type event_stats", DeprecationWarning)
            _read_file(file, events, launches)
    events.sort(key=lambda event: (event.device, event.start_us))
    return events, sorted(launches, key=lambda launch: launch.start_us)


def _read_file(file: pathlib.Path, events: list[Event], launches: list[Launch]) -> None:
    data = jax.profiler.ProfileData.from_file(str(file))  # its parts are views of it
    for plane in data.planes:
        gpu = re.search(r"/device:GPU:(\d+)", plane.name)
        for line in plane.lines if gpu or plane.name == "/host:CPU" else ():
            stream = line.name.split("(")[0]
            if gpu and not stream.startswith("Stream"):
                continue
            until = 0.0  # JAX opens an event of one call twice, one inside the other
            for event in line.events:
                stats = dict(event.stats)
                start_us, us = event.start_ns / 1e3, event.duration_ns / 1e3
                function = _LAUNCH.fullmatch(event.name)
                if not gpu and ("step_num" in stats or (function and start_us >= until)):
                    until = start_us + us if function else until
                    launches.append(Launch(function[1] if function else event.name, start_us, not function))
                    continue
                op = str(stats.get("hlo_op", ""))
                if not gpu and (not op or event.name.startswith("end: ") or _LOOPS.fullmatch(op)):
                    continue
                device = int(gpu[1]) if gpu else int(stats.get("device_ordinal", 0))
                # All of a CUDA graph's kernels have its name.
                hidden = "cuda_graph_id" in stats or op.startswith("command_buffer")
                program = str(stats.get("hlo_module", ""))
                events.append(Event(event.name, start_us, us, device, stream, program, "" if hidden else op))


def union_us(events: Iterable[Event]) -> float:
    """Microseconds in which at least one of the events runs."""
    total, until = 0.0, -math.inf
    for start, end in sorted((event.start_us, event.end_us) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def exposed_us(events: Iterable[Event], others: Iterable[Event]) -> float:
    """Microseconds in which one of `events` runs and none of `others`."""
    events, others = list(events), list(others)
    return union_us([*events, *others]) - union_us(others)
