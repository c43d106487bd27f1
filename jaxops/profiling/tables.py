"""Reports and comparisons in a terminal."""

import io
from collections.abc import Sequence

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from jaxops._lib.terminal import console
from jaxops.profiling.comparison import Comparison
from jaxops.profiling.report import Group, Report, heaviest

_ROWS = 15


def as_text(found: Report | Comparison, width: int = 130) -> str:
    """What a terminal would show, without colours."""
    text = io.StringIO()
    console(file=text, width=width, color_system=None).print(found)
    return text.getvalue().rstrip()


def of_report(report: Report) -> RenderableType:
    lines: list[RenderableType] = [Text(summary(report))]
    lines.append(_kernels("kernel", report.by_kernel(), report))
    lines.append(_kernels("module or named scope", report.by_scope(together=True), report))
    lines.append(_kernels("part of the step", report.by_stage(), report))
    if holders := (report.memory or {}).get("holders"):
        lines.append(_memory(report.memory or {}, holders))
    lines += [Text(f"note: {note}", style="dim") for note in report.notes]
    return Lines(*lines)


def summary(report: Report) -> str:
    """Where the time goes, in a few lines."""
    devices = report.device if report.devices == 1 else f"{report.devices} x {report.device}, the mean of them"
    lines = [f"{report.program} on {devices}: {_ms(report.step_us)} a step, mean of {report.steps}"]
    parts = [f"busy {_ms(report.busy_us)}", f"idle {_ms(report.idle_us)} ({_share(report.idle_us, report.step_us)})"]
    if report.exposed_communication_us:
        parts.append(f"communication alone {_ms(report.exposed_communication_us)}")
    if report.exposed_copies_us:
        parts.append(f"copies from or to the host alone {_ms(report.exposed_copies_us)}")
    lines.append("  the device: " + ", ".join(parts))
    if report.floor_us is not None:
        least = f"  its kernels at the card's ceilings: {_ms(report.floor_us)}"
        lines.append(least + (f"; MFU {report.mfu:.1%} of the measured dense rate" if report.mfu else ""))
    lines.append(
        f"  {report.accounted:.1%} of the kernels' time is accounted for by the instruction that launched them"
    )
    if report.ceilings is not None:
        rates = ", ".join(f"{_rate(rate)} TFLOP/s {name}" for name, rate in report.ceilings["dense_tflops"].items())
        lines.append(f"  measured ceilings: copy {_rate(report.ceilings['copy_gbps'])} GB/s, dense {rates}")
    if report.busy_us > report.step_us:
        lines.append("  (busy for longer than a step takes without the profiler, which makes kernels somewhat slower)")
    return "\n".join(lines)


def _kernels(title: str, groups: Sequence[Group], report: Report) -> Table:
    table = _table(title, "calls", "time", "share", "TFLOP/s", "GB/s", "of ceiling", "bound by", numbers=(1, 7))
    shown, rest = heaviest(groups, _ROWS)
    for group in [*shown, *([rest] if rest else [])]:
        mark = ">" if group.partial else ""  # more than is known
        rates = (f"{mark}{_rate(rate)}" if rate else "" for rate in (group.tflops, group.gbps))
        reached = "" if group.of_ceiling is None else f"{mark}{group.of_ceiling:.0%}"
        share = _share(group.us, report.kernels_us)
        table.add_row(_cut(group.name), f"{group.calls:,.0f}", _ms(group.us), share, *rates, reached, group.bound)
    return table


def _memory(memory: dict, holders: Sequence[dict]) -> Table:
    """What holds the peak, by place and kind."""
    totals: dict[tuple[str, str, str], int] = {}
    for each in holders:
        key = each["scope"] or "(no module)", each["kind"], each["name"] or ""
        totals[key] = totals.get(key, 0) + each["bytes"]
    found = sorted(totals.items(), key=lambda item: -item[1])
    table = _table(f"{_gb(memory['peak_bytes'])} at the peak, held by", "", "kind", "residual", numbers=(1, 2))
    for (scope, kind, name), size in found[:_ROWS]:
        table.add_row(_cut(scope, 64), _gb(size), kind, Text(name))
    if rest := found[_ROWS:]:
        table.add_row(f"{len(rest)} others", _gb(sum(size for _, size in rest)), "", "")
    return table


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def _table(*titles: str, numbers: tuple[int, int]) -> Table:
    """With right-aligned columns of numbers, from the first to before the second. Names are cut off before numbers."""
    table = Table()
    for i, title in enumerate(titles):
        if numbers[0] <= i < numbers[1]:
            table.add_column(title, justify="right", no_wrap=True)
        else:
            table.add_column(title, no_wrap=True, overflow="ellipsis")
    return table


def of_comparison(found: Comparison) -> RenderableType:
    step = f"{found.before.program}: a step took {_ms(found.before.step_us)}, now {_ms(found.after.step_us)}"
    table = _table("kernel", "module or named scope", "before", "after", "difference", "change", numbers=(2, 6))
    for row in found.rows[:_ROWS]:
        table.add_row(
            _cut(row.name),
            _cut(row.scope),
            _ms(row.before_us),
            _ms(row.after_us),
            f"{row.difference_us / 1e3:+.3f} ms",
            row.change_text,
        )
    rest = found.rows[_ROWS:]
    if rest:
        difference = sum(row.difference_us for row in rest)
        table.add_row(f"{len(rest)} others", "", "", "", f"{difference / 1e3:+.3f} ms", "")
    return Lines(Text(f"{step} ({found.ratio - 1:+.1%})"), table)


def _cut(name: str, most: int = 42) -> Text:
    """A name that leaves room for numbers: its beginning and its end."""
    return Text(name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}")


def _ms(us: float) -> str:
    return f"{us / 1e3:,.3f} ms" if us < 1e5 else f"{us / 1e3:,.1f} ms"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
