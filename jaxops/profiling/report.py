"""Where a step's time goes, kernel by kernel, and what the card could do."""

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxops.profiling.scopes import Stage
from jaxops.profiling.trace import Event

Bound = Literal["tensor cores", "memory", "launch latency", "communication", "copy", "host", "unknown"]
# A kernel of fewer microseconds that is far from both ceilings is bound by its launch and its first loads.
_LATENCY_US, _FAR = 10.0, 0.5


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one instruction of the program launched, of one step of one device.

    Attributes:
      name: of the kernel or copy.
      kind: of `trace.Event`.
      program, op: the compiled program and its HLO instruction; op is empty if the instruction is unknown.
      scope: modules and named scopes, outermost first, with slashes.
      primitive: JAX's.
      stage: part of the step: "recomputed" for `jax.checkpoint`, "other" for what is not part of a gradient.
      calls, us: a step: launches, and time on the device.
      flops, bytes: a step; None if nobody can say. For ragged ops upper bounds: as if every row lay in a group.
      dtype: of the products' operands.
      least_us: its time at the card's ceilings; None if unknown.
      needs: the ceiling that binds.
    """

    name: str
    kind: str
    program: str
    op: str
    scope: str
    primitive: str
    stage: Stage
    calls: float
    us: float
    flops: float | None
    bytes: float | None
    dtype: str | None
    least_us: float | None
    needs: Literal["tensor cores", "memory"] | None

    @property
    def label(self) -> str:
        """The name without the numbers that XLA appends."""
        return re.sub(r"([._]\d+)+$", "", self.name).rstrip("_")

    @property
    def known(self) -> bool:
        """Whether its origin is known: the instruction that launched it, or a copy, fill or collective."""
        return bool(self.op) or self.kind != "kernel"


@dataclasses.dataclass(frozen=True)
class Group:
    """Some kernels of a step together; attributes as of `Kernel`."""

    name: str
    kernels: tuple[Kernel, ...]

    @property
    def us(self) -> float:
        return sum(each.us for each in self.kernels)

    @property
    def calls(self) -> float:
        return sum(each.calls for each in self.kernels)

    def _sum(self, field: str) -> float | None:
        """Of those that are known; None if none is."""
        known = [value for each in self.kernels if (value := getattr(each, field)) is not None]
        return sum(known) if known else None

    @property
    def flops(self) -> float | None:
        return self._sum("flops")

    @property
    def bytes(self) -> float | None:
        return self._sum("bytes")

    @property
    def least_us(self) -> float | None:
        return self._sum("least_us")

    @property
    def partial(self) -> bool:
        """Whether FLOPs or bytes of some kernel are unknown, so that the sums are too small."""
        return any(each.kind == "kernel" and (each.flops is None or each.bytes is None) for each in self.kernels)

    @property
    def tflops(self) -> float | None:
        return self.flops / self.us / 1e6 if self.flops is not None and self.us else None

    @property
    def gbps(self) -> float | None:
        return self.bytes / self.us / 1e3 if self.bytes is not None and self.us else None

    @property
    def of_ceiling(self) -> float | None:
        return self.least_us / self.us if self.least_us is not None and self.us else None

    @property
    def bound(self) -> Bound:
        """What bounds the largest part of its time."""
        parts: dict[Bound, float] = {"unknown": 0.0}
        for each in self.kernels:
            bound = bound_of(each)
            parts[bound] = parts.get(bound, 0.0) + each.us
        return max(parts, key=lambda bound: parts[bound])


def bound_of(kernel: Kernel) -> Bound:
    """What bounds a kernel."""
    if kernel.kind == "communication":
        return "communication"
    if kernel.kind != "kernel":
        return "copy"
    each, reached = kernel.us / max(kernel.calls, 1e-9), (kernel.least_us or 0.0) / max(kernel.us, 1e-9)
    if each < _LATENCY_US and reached < _FAR:
        return "launch latency"
    return "unknown" if kernel.needs is None else kernel.needs


@dataclasses.dataclass(frozen=True)
class Report:
    """Where a step's time goes. Times are microseconds of one step; of several devices, the mean over them.

    Attributes:
      program: of the step, such as "jit_step".
      device: the card's name.
      devices, steps: profiled.
      step_us: from a step's end to the next one's, without the profiler.
      profiled_us: the same with it: what the profile costs.
      busy_us: in which something runs on the device.
      exposed_communication_us, exposed_copies_us: in which only collectives, or only copies between host and device,
        run.
      kernels: the longest first.
      ceilings: `Ceilings.to_dict()`; None if there are none.
      memory: `Memory.to_dict()`; None if unknown.
      notes: what this report cannot know, and why.
      made: versions and date.
      events: all that ran in the recorded steps; not part of the JSON.
    """

    program: str
    device: str
    devices: int
    steps: int
    step_us: float
    profiled_us: float
    busy_us: float
    exposed_communication_us: float
    exposed_copies_us: float
    kernels: tuple[Kernel, ...]
    ceilings: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    made: dict[str, str] = dataclasses.field(default_factory=dict)
    events: tuple[Event, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def kernels_us(self) -> float:
        """Time of all kernels and copies; above `busy_us` where some run beside each other."""
        return sum(each.us for each in self.kernels)

    @property
    def idle_us(self) -> float:
        """In which nothing runs on the device: it waits for the host."""
        return max(0.0, self.step_us - self.busy_us)

    @property
    def accounted(self) -> float:
        """The share of the kernels' time whose origin is known."""
        return sum(each.us for each in self.kernels if each.known) / self.kernels_us if self.kernels else 0.0

    @property
    def floor_us(self) -> float | None:
        """The step's time if each kernel reached its ceiling and the device were never idle; a kernel whose FLOPs and
        bytes are unknown takes its own time. None without ceilings."""
        if self.ceilings is None:
            return None
        return sum(each.us if each.least_us is None else min(each.us, each.least_us) for each in self.kernels)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the time that the step's products need at the measured dense rates, without those
        that `jax.checkpoint` computes again, over the step's time. None if unknown."""
        if self.ceilings is None:
            return None
        rates = self.ceilings["dense_tflops"]
        needed = [
            each.flops / (rates[each.dtype] * 1e6)
            for each in self.kernels
            if each.flops and each.dtype in rates and each.stage != "recomputed"
        ]
        return sum(needed) / self.step_us if needed else None

    def groups(self, key: Callable[[Kernel], str]) -> list[Group]:
        """Kernels with the same key together, the longest first."""
        found: dict[str, list[Kernel]] = {}
        for each in self.kernels:
            found.setdefault(key(each), []).append(each)
        return sorted((Group(name, tuple(each)) for name, each in found.items()), key=lambda group: -group.us)

    def by_kernel(self) -> list[Group]:
        return self.groups(lambda kernel: kernel.label)

    def by_scope(self, depth: int | None = None, *, together: bool = False) -> list[Group]:
        """By module or named scope.

        Args:
          depth: parts of the path that count; by default all.
          together: layers/0 and layers/1 are one, layers/*.
        """

        def key(kernel: Kernel) -> str:
            parts = kernel.scope.split("/")[:depth]
            path = "/".join("*" if together and part.isdecimal() else part for part in parts)
            return path or ("(no module)" if kernel.kind == "kernel" else f"({kernel.kind})")

        return self.groups(key)

    def by_stage(self) -> list[Group]:
        """By forward, backward, recomputation and the rest; of other programs than the step's by program."""
        return self.groups(
            lambda kernel: kernel.stage if kernel.program == self.program else kernel.program or kernel.kind
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(dataclasses.replace(self, events=())), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Reads `to_json`'s text.

        Raises:
          ValueError: it is not of a report.
        """
        try:
            fields = json.loads(text)
            kernels = tuple(Kernel(**each) for each in fields.pop("kernels"))
            return cls(**fields | {"kernels": kernels, "notes": tuple(fields["notes"]), "events": ()})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is no report of jaxops.profiling: {type(error).__name__}: {error}") from error

    @classmethod
    def load(cls, file: str | pathlib.Path) -> "Report":
        try:
            return cls.from_json(pathlib.Path(file).read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @property
    def summary(self) -> str:
        """Where the time goes, in a few lines."""
        from jaxops.profiling import tables

        return tables.summary(self)

    def __rich__(self):
        from jaxops.profiling import tables

        return tables.of_report(self)

    def __str__(self) -> str:
        from jaxops.profiling import tables

        return tables.as_text(self)

    def draw(self, file: str | pathlib.Path) -> pathlib.Path:
        """A PNG: the step's time, and its kernels under the card's ceilings. Needs matplotlib (extra `bench`)."""
        from jaxops.profiling import pictures

        return pictures.draw_report(self, pathlib.Path(file))

    def write_trace(self, file: str | pathlib.Path) -> pathlib.Path:
        """All that ran in the recorded steps, gzipped, for https://ui.perfetto.dev.

        Raises:
          ValueError: the report was read from JSON, or nothing ran.
        """
        from jaxops.profiling import pictures

        if not self.events:
            raise ValueError("this report has no events: it was read from JSON, or the profiler saw nothing run.")
        return pictures.write_trace(self, pathlib.Path(file))

    def save(self, folder: str | pathlib.Path, name: str = "profile") -> list[pathlib.Path]:
        """Writes NAME.json, NAME.txt, NAME.trace.json.gz and, with matplotlib, NAME.png."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{name}.json", folder / f"{name}.txt"]
        files[0].write_text(self.to_json(), "utf-8")
        files[1].write_text(f"{self}\n", "utf-8")
        if self.events:
            files.append(self.write_trace(folder / f"{name}.trace.json.gz"))
        with contextlib.suppress(ImportError):
            files.append(self.draw(folder / f"{name}.png"))
        return files


def heaviest(groups: Sequence[Group], most: int) -> tuple[list[Group], Group | None]:
    """The first ones, and the others as one."""
    rest = groups[most:]
    if not rest:
        return list(groups), None
    return list(groups[:most]), Group(f"{len(rest)} others", tuple(each for group in rest for each in group.kernels))
