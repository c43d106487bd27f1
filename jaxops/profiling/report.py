"""Where a step's time goes, kernel by kernel, and what the card could do."""

import collections
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Literal

from jaxops.profiling.machine import Ceilings
from jaxops.profiling.memory import Holder, Memory
from jaxops.profiling.scopes import Stage
from jaxops.profiling.tables import cut, ms_text, rate_text, share_text, table

Bound = Literal["tensor cores", "memory", "launch latency", "communication", "copy", "unknown"]
# A kernel of fewer microseconds that is far from both ceilings is bound by its launch and its first loads.
_LATENCY_US, _FAR = 10.0, 0.5
_ROWS = 15


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one instruction of the program launched, of one step of one device.

    Attributes:
      name: of the kernel or copy.
      kind: of `trace.Event`.
      program, op: the compiled program and its HLO instruction; op is empty if the instruction is unknown.
      scope: named scopes, outermost first, with slashes.
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

    @property
    def bound(self) -> Bound:
        """What bounds it."""
        if self.kind != "kernel":
            return "communication" if self.kind == "communication" else "copy"
        if self.us < _LATENCY_US * self.calls and (self.least_us or 0.0) < _FAR * self.us:
            return "launch latency"
        return self.needs or "unknown"


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

    @property
    def partial(self) -> bool:
        """Whether FLOPs or bytes of some kernel are unknown, so that the sums are too small."""
        return any(each.kind == "kernel" and None in (each.flops, each.bytes) for each in self.kernels)

    @property
    def tflops(self) -> float | None:
        return self._rate("flops", 1e6)

    @property
    def gbps(self) -> float | None:
        return self._rate("bytes", 1e3)

    @property
    def of_ceiling(self) -> float | None:
        return self._rate("least_us", 1)

    def _rate(self, field: Literal["flops", "bytes", "least_us"], unit: float) -> float | None:
        """The sum of the kernels of which it is known over the time; None if it is known of none."""
        known = [value for each in self.kernels if (value := getattr(each, field)) is not None]
        return sum(known) / self.us / unit if known and self.us else None

    @property
    def bound(self) -> Bound:
        """What bounds the largest part of its time."""
        parts = collections.Counter[Bound]()
        for each in self.kernels:
            parts[each.bound] += each.us  # pyright: ignore[reportArgumentType]
        return parts.most_common(1)[0][0]


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
      ceilings, memory: None if unknown.
      notes: what this report cannot know, and why.
      made: versions and date.
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
    ceilings: Ceilings | None = None
    memory: Memory | None = None
    notes: tuple[str, ...] = ()
    made: dict[str, str] = dataclasses.field(default_factory=dict)

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
        needed = [
            each.flops / (rate * 1e6)
            for each in self.kernels
            if each.flops and each.dtype and each.stage != "recomputed"
            if (rate := self.ceilings.product_tflops(each.dtype))
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
        """By named scope.

        Args:
          depth: parts of the path that count; by default all.
          together: layers/0 and layers/1 are one, layers/*.
        """

        def key(kernel: Kernel) -> str:
            parts = kernel.scope.split("/")[:depth]
            path = "/".join("*" if together and part.isdecimal() else part for part in parts)
            return path or ("(no scope)" if kernel.kind == "kernel" else f"({kernel.kind})")

        return self.groups(key)

    def by_stage(self) -> list[Group]:
        """By forward, backward, recomputation and the rest; of other programs than the step's by program."""
        return self.groups(
            lambda kernel: kernel.stage if kernel.program == self.program else kernel.program or kernel.kind
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def load(cls, file: str | pathlib.Path) -> "Report":
        """Reads what `save` wrote.

        Raises:
          ValueError: the file is not of a report.
        """
        try:
            fields = json.loads(pathlib.Path(file).read_text("utf-8"))
            fields["kernels"] = tuple(Kernel(**each) for each in fields["kernels"])
            fields["notes"] = tuple(fields["notes"])
            if (memory := fields.get("memory")) is not None:
                fields["memory"] = Memory(**memory | {"holders": tuple(Holder(**each) for each in memory["holders"])})
            if fields.get("ceilings") is not None:
                fields["ceilings"] = Ceilings(**fields["ceilings"])
            return cls(**fields)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{file}: this is no report of jaxops.profiling: {type(error).__name__}: {error}"
            ) from error

    @property
    def summary(self) -> str:
        """Where the time goes, in a few lines."""
        devices = self.device if self.devices == 1 else f"{self.devices} x {self.device}, the mean of them"
        idle = f"idle {ms_text(self.idle_us)} ({share_text(self.idle_us, self.step_us)})"
        parts = [f"busy {ms_text(self.busy_us)}", idle]
        if self.exposed_communication_us:
            parts.append(f"communication alone {ms_text(self.exposed_communication_us)}")
        if self.exposed_copies_us:
            parts.append(f"copies from or to the host alone {ms_text(self.exposed_copies_us)}")
        lines = [
            f"{self.program} on {devices}: {ms_text(self.step_us)} a step, mean of {self.steps}",
            "the device: " + ", ".join(parts),
            f"{self.accounted:.1%} of the kernels' time is accounted for by the instruction that launched them",
        ]
        if self.ceilings is not None and self.floor_us is not None:
            mfu = f"; MFU {self.mfu:.1%} of the measured dense rate" if self.mfu else ""
            lines.append(f"its kernels at the card's ceilings: {ms_text(self.floor_us)}{mfu}")
            lines.append(f"measured ceilings: {self.ceilings}")
        if self.busy_us > self.step_us:
            lines.append("busy for longer than a step takes without the profiler, which makes kernels somewhat slower")
        return "\n  ".join(lines)

    def _table(self, title: str, groups: Sequence[Group]) -> str:
        rest = groups[_ROWS:]
        others = [Group(f"{len(rest)} others", tuple(each for group in rest for each in group.kernels))] if rest else []
        rows = []
        for group in [*groups[:_ROWS], *others]:
            reached = "" if group.of_ceiling is None else f"{group.of_ceiling:.0%}"
            known = (rate_text(group.tflops), rate_text(group.gbps), reached)
            mark = ">" if group.partial else ""  # more than is known
            share = share_text(group.us, self.kernels_us)
            rows.append([cut(group.name), f"{group.calls:,.0f}", ms_text(group.us), share,
                         *(f"{mark}{text}" if text else "" for text in known), group.bound])  # fmt: skip
        return table(f"{title}|>calls|>time|>share|>TFLOP/s|>GB/s|>of ceiling|bound by", rows)

    def __str__(self) -> str:
        tables = {"kernel": self.by_kernel(), "named scope": self.by_scope(together=True)}
        tables["part of the step"] = self.by_stage()
        parts = [self.summary, *(self._table(title, groups) for title, groups in tables.items())]
        parts += [str(self.memory)] if self.memory else []
        return "\n\n".join([*parts, *(f"note: {note}" for note in self.notes)])

    def save(self, folder: str | pathlib.Path, name: str = "profile") -> list[pathlib.Path]:
        """Writes NAME.json and NAME.txt."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{name}.json", folder / f"{name}.txt"]
        files[0].write_text(self.to_json(), "utf-8")
        files[1].write_text(f"{self}\n", "utf-8")
        return files
