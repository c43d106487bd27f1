"""Two reports of the same step, kernel by kernel: what became slower."""

import collections
import dataclasses

from jaxops.profiling.report import Kernel, Report
from jaxops.profiling.tables import cut, ms_text, table

_ROWS = 15


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel of one named scope; 0 microseconds a step where it is missing."""

    name: str
    scope: str
    before_us: float
    after_us: float

    @property
    def difference_us(self) -> float:
        return self.after_us - self.before_us

    @property
    def change_text(self) -> str:
        if not self.before_us or not self.after_us:
            return "new" if self.after_us else "gone"
        return f"{self.after_us / self.before_us - 1:+.1%}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What changed between two reports. Rows: the largest differences first."""

    before: Report
    after: Report
    rows: tuple[Row, ...]

    @property
    def ratio(self) -> float:
        """The step's time after over before."""
        return self.after.step_us / self.before.step_us

    def slower_by(self, share: float) -> bool:
        """Whether the step became slower by more than `share`, such as 0.05."""
        return self.ratio > 1 + share

    def __str__(self) -> str:
        times = f"a step took {ms_text(self.before.step_us)}, now {ms_text(self.after.step_us)}"
        rows = [
            [cut(row.name), cut(row.scope), ms_text(row.before_us), ms_text(row.after_us),
             f"{row.difference_us / 1e3:+.3f} ms", row.change_text]
            for row in self.rows[:_ROWS]
        ]  # fmt: skip
        if rest := self.rows[_ROWS:]:
            difference_us = sum(row.difference_us for row in rest)
            rows.append([f"{len(rest)} others", "", "", "", f"{difference_us / 1e3:+.3f} ms", ""])
        head = f"{self.before.program}: {times} ({self.ratio - 1:+.1%})"
        return f"{head}\n" + table("kernel|named scope|>before|>after|>difference|>change", rows)


def compare(before: Report, after: Report) -> Comparison:
    """Two steps, kernel by kernel. Kernels are the same if their names, without XLA's numbers, scopes and stages are.

    Raises:
      ValueError: the reports are of different devices, or a step's time is 0.
    """
    if (before.device, before.devices) != (after.device, after.devices):
        raise ValueError(
            f"the reports are of {before.devices} x {before.device} and {after.devices} x {after.device}: compare "
            "reports of the same devices."
        )
    if not before.step_us or not after.step_us:
        raise ValueError("a report's step took no time: nothing can be compared.")
    times = [_times(report) for report in (before, after)]
    keys = dict.fromkeys([*times[0], *times[1]])
    rows = [Row(name, scope, *(each.get((name, scope), 0.0) for each in times)) for name, scope in keys]
    return Comparison(before, after, tuple(sorted(rows, key=lambda row: -abs(row.difference_us))))


def _times(report: Report) -> dict[tuple[str, str], float]:
    times: dict[tuple[str, str], float] = collections.defaultdict(float)
    for each in report.kernels:
        times[each.label, _place(each)] += each.us
    return times


def _place(kernel: Kernel) -> str:
    return kernel.scope if kernel.stage == "forward" else f"{kernel.scope} ({kernel.stage})".strip()
