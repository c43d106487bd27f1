"""Pictures of reports, and their events for Perfetto."""

import gzip
import json
import pathlib
from typing import Any

from jaxops.profiling.report import Group, Report, bound_of
from jaxops.profiling.trace import Event

_LABELLED = 12  # kernels of a picture
_SEEN = 1e-3  # of the time: smaller kernels are left out
_LEAST = 1e-3  # FLOPs a byte of a kernel in the picture: others are copies in all but name
_COLOURS = {
    "tensor cores": "#3b6fb6",
    "memory": "#d9822b",
    "launch latency": "#8e6bbf",
    "communication": "#c23b4e",
    "copy": "#b5a642",
    "unknown": "#7f7f7f",
    "device idle": "#d9d9d9",
}


def figure_of(width: float, height: float) -> Any:
    """A matplotlib figure.

    Raises:
      ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'jaxops[bench]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_report(report: Report, file: pathlib.Path) -> pathlib.Path:
    """The step's time by what bounds it, and its kernels under the card's ceilings."""
    figure = figure_of(12, 7.5)
    # Names are no mathematics: "$" is in those of cuBLAS' calls, and may be in a program's.
    figure.suptitle(f"{report.program} on {report.device}: {report.step_us / 1e3:.2f} ms a step", parse_math=False)
    rows = figure.subplots(2, 1, height_ratios=(1, 4.5))
    _draw_times(rows[0], report)
    _draw_roofline(rows[1], report)
    figure.savefig(file, dpi=120)
    return file


def _draw_times(axis: Any, report: Report) -> None:
    times: dict[str, float] = {}
    for each in report.kernels:
        bound = bound_of(each)
        times[bound] = times.get(bound, 0.0) + each.us
    scale = report.busy_us / report.kernels_us if report.kernels_us else 0.0  # where kernels run beside each other
    spans = {bound: us * scale for bound, us in sorted(times.items(), key=lambda item: -item[1])}
    spans |= {"device idle": report.idle_us} if report.idle_us else {}
    start = 0.0
    for bound, us in spans.items():
        axis.barh(
            0, us / 1e3, left=start / 1e3, color=_COLOURS[bound], edgecolor="white", label=_named(bound, us, report)
        )
        start += us
    if report.floor_us is not None:
        axis.axvline(report.floor_us / 1e3, color="black", linestyle="--", linewidth=1)
        text = f" floor {report.floor_us / 1e3:.2f} ms:\n every kernel at its ceiling"
        axis.text(report.floor_us / 1e3, 0.78, text, va="bottom", fontsize=8)
    axis.set(ylim=(-0.5, 1.6), yticks=[], xlabel="milliseconds of one step", xlim=(0, max(start, report.step_us) / 1e3))
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False, title="bound by")


def _named(bound: str, us: float, report: Report) -> str:
    return f"{bound}: {us / 1e3:.2f} ms, {us / report.step_us:.0%}"


def _draw_roofline(axis: Any, report: Report) -> None:
    """FLOPs a byte and TFLOP/s of each kernel; the area is its share of the time."""
    groups = [
        group
        for group in report.by_kernel()
        if group.flops and group.bytes and group.flops > _LEAST * group.bytes and group.us > _SEEN * report.kernels_us
    ]
    axis.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="TFLOP/s")
    axis.grid(True, which="major", alpha=0.3)
    names = []
    for number, group in enumerate(groups, 1):
        intensity, share = _intensity(group), group.us / report.kernels_us
        axis.scatter(intensity, group.tflops, s=20 + 3000 * share, color=_COLOURS[group.bound], alpha=0.6)
        if number <= _LABELLED:
            axis.annotate(str(number), (intensity, group.tflops), ha="center", va="center", fontsize=8)
            names.append(f"{number}  {share:4.0%}  {group.name[:34]}")
    named = "\n".join(names)
    axis.text(1.01, 1.0, named, transform=axis.transAxes, va="top", fontsize=8, family="monospace", parse_math=False)
    if report.ceilings is None or not groups:
        return
    copy = report.ceilings["copy_gbps"] / 1e3  # TFLOP/s at one FLOP a byte
    used = {each.dtype for group in groups for each in group.kernels if each.dtype}
    rates = {name: rate for name, rate in report.ceilings["dense_tflops"].items() if name in used}
    low, high = min(map(_intensity, groups)) / 2, max(max(map(_intensity, groups)) * 2, 2e3)
    top = max(rates.values(), default=high * copy)
    axis.plot([low, top / copy], [low * copy, top], color="black", linewidth=1)
    axis.text(low, low * copy * 2, f"memory: {report.ceilings['copy_gbps']:,.0f} GB/s", fontsize=9)
    for name, rate in rates.items():
        axis.plot([rate / copy, high], [rate, rate], color="black", linewidth=1)
        axis.text(rate / copy, rate, f"{name}: {rate:,.3g} TFLOP/s ", ha="right", va="center", fontsize=9)
    axis.set_title(
        "each circle is a kernel: its area is its share of the time, the lines are what this card reaches", fontsize=9
    )


def _intensity(group: Group) -> float:
    """FLOPs a byte."""
    return (group.flops or 0.0) / (group.bytes or 1.0)


def write_trace(report: Report, file: pathlib.Path) -> pathlib.Path:
    """In Chrome's trace format, gzipped: a process a device, a thread a stream."""
    rows = {(each.program, each.op, each.name): each for each in report.kernels}
    begin = min(event.start_us for event in report.events)
    found = [
        {
            "name": event.name[:80],
            "ph": "X",
            "pid": f"device {event.device}",
            "tid": event.stream,
            "ts": round(event.start_us - begin, 3),
            "dur": round(event.us, 3),
            "cat": event.kind,
            "args": _facts(event, rows),
        }
        for event in report.events
    ]
    # Without the time in its head the same events are the same file.
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": found}).encode(), mtime=0))
    return file


def _facts(event: Event, rows: dict) -> dict[str, Any]:
    row = rows.get((event.program, event.op, event.name))
    if row is None:
        return {}
    facts = {"program": row.program, "instruction": row.op, "scope": row.scope, "primitive": row.primitive}
    facts |= {"stage": row.stage, "bound by": bound_of(row)}
    if row.flops is not None and row.bytes is not None:
        facts |= {"FLOPs": row.flops / row.calls, "bytes": row.bytes / row.calls}
    if row.least_us is not None and row.us:
        facts["of ceiling"] = round(row.least_us / row.us, 3)
    return facts
