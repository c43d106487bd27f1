"""What ran on the devices while some calls were made: kernels, copies and collectives, from JAX's profiler."""

import contextlib
import dataclasses
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from typing import Literal

import jax

Kind = Literal["kernel", "communication", "copy on device", "copy to host", "copy to device", "fill"]
_LOOPS = re.compile(r"(while|call|conditional)(\.\d+)?")  # on a CPU an event of theirs contains the body's
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
def recorded() -> Iterator[list[Event]]:
    """Fills the list, at the end, with what ran on the devices inside, in order; on a CPU with XLA's operations.

    Wait inside for the results that shall be part of it.

    Raises:
      ProfilerBusy: `jax.profiler` records already.
    """
    found: list[Event] = []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls cost more than the step's kernels
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise ProfilerBusy(f"jax.profiler records a profile already: end it first ({error}).") from error
        _profilers["started"] = True
        try:
            yield found
        finally:
            jax.profiler.stop_trace()
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            found += read(file)
    found.sort(key=lambda event: (event.device, event.start_us))


def read(file: pathlib.Path) -> list[Event]:
    """The events of an XPlane file."""
    with warnings.catch_warnings():
        # jaxlib 0.12 makes its types with a warning about itself; as an error it would end the process.
        warnings.filterwarnings("ignore", "builtin type event_stats", DeprecationWarning)
        return _read(file)


def _read(file: pathlib.Path) -> list[Event]:
    found = []
    data = jax.profiler.ProfileData.from_file(str(file))  # its parts are views of it
    for plane in data.planes:
        gpu = re.search(r"/device:GPU:(\d+)", plane.name)
        for line in plane.lines if gpu or plane.name == "/host:CPU" else ():
            name = line.name.split("(")[0]
            if gpu and not name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                op = str(stats.get("hlo_op", ""))
                if not gpu and (not op or event.name.startswith("end: ") or _LOOPS.fullmatch(op)):
                    continue
                device = int(gpu[1]) if gpu else int(stats.get("device_ordinal", 0))
                program = str(stats.get("hlo_module", ""))
                # All of a CUDA graph's kernels have its name.
                hidden = "cuda_graph_id" in stats or op.startswith("command_buffer")
                op = "" if hidden else op
                found.append(
                    Event(event.name, event.start_ns / 1e3, event.duration_ns / 1e3, device, name, program, op)
                )
    return found


def union_us(events: Iterable[Event]) -> float:
    """Microseconds in which at least one of the events runs."""
    return sum(end - start for start, end in spans(events))


def spans(events: Iterable[Event]) -> list[tuple[float, float]]:
    """(start, end) of the times in which at least one event runs, in order."""
    found: list[list[float]] = []
    for start, end in sorted((event.start_us, event.end_us) for event in events):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return [(start, end) for start, end in found]


def exposed_us(events: Iterable[Event], others: Iterable[Event]) -> float:
    """Microseconds in which one of `events` runs and none of `others`."""
    events, others = list(events), list(others)
    return union_us([*events, *others]) - union_us(others)
