"""The kernels and copies of one call as the profiler saw them.

Read, written to a file for https://ui.perfetto.dev, and drawn.
"""

import dataclasses
import gzip
import json
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from benchmarks import harness
from jaxops.profiling import trace
from jaxops.profiling.trace import Event, recorded

KERNELS, ON_DEVICE, TO_HOST, TO_DEVICE, COLLECTIVES = LANES = (
    "kernels",
    "copies on the device",
    "to the host",
    "to the device",
    "between devices",
)
_LANES: dict[trace.Kind, str] = {
    "kernel": KERNELS,
    "fill": KERNELS,
    "copy on device": ON_DEVICE,
    "copy to host": TO_HOST,
    "copy to device": TO_DEVICE,
    "communication": COLLECTIVES,
}
WINDOW = (
    2.5 / 24
)  # of the copies' time that a picture shows at large: some layers of as many as the benchmark's models have


def lane_of(event: Event) -> str:
    return _LANES[event.kind]


def device_events(run: Callable[[], Any]) -> list[Event]:
    """The events of one call; empty without a GPU. `harness.kernels` calls twice, but a step's state is donated."""
    if not harness.on_gpu():
        jax.block_until_ready(run())
        return []
    with recorded() as events:
        jax.block_until_ready(run())
    return named(events)


def named(events: Iterable[Event]) -> list[Event]:
    """Without the numbers that XLA appends to fusions."""
    return [dataclasses.replace(event, name=re.sub(r"[._]\d+", "", event.name)) for event in events]


def write_trace(events: list[Event], file: pathlib.Path) -> None:
    """In Chrome's trace format, a thread a lane, from the first event on."""
    begin = min(event.start_us for event in events)
    found = [
        {
            "name": event.name[:60],
            "ph": "X",
            "pid": 0,
            "tid": lane_of(event),
            "ts": round(event.start_us - begin, 1),
            "dur": round(event.us, 1),
        }
        for event in events
    ]
    # Without the time in its head the same events are the same file.
    file.write_bytes(
        gzip.compress(json.dumps({"traceEvents": sorted(found, key=lambda event: event["ts"])}).encode(), mtime=0)
    )


def read_trace(file: pathlib.Path) -> list[Event]:
    return [
        Event(event["name"], event["ts"], event["dur"], device=0, stream="")
        for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    ]


def draw_trace(file: pathlib.Path) -> pathlib.Path:
    """<name>.png beside <name>.trace.json.gz: the whole step, and a few layers of each kind of transfer.

    Needs matplotlib (extra `bench`).
    """
    from matplotlib.figure import Figure

    events = read_trace(file)
    spans = {
        lane: [(event.start_us / 1e3, event.us / 1e3) for event in events if lane_of(event) == lane] for lane in LANES
    }
    lanes = [lane for lane in LANES if spans[lane]]
    windows = {"step": (0.0, max(event.start_us + event.us for event in events) / 1e3)}
    for part, lane in (("forward", TO_HOST), ("backward", TO_DEVICE), (COLLECTIVES, COLLECTIVES)):
        if starts := [start for start, _ in spans[lane]]:
            middle, width = (
                float(np.median(starts)),
                (max(start + long for start, long in spans[lane]) - min(starts)) * WINDOW,
            )
            windows[part] = (middle - width / 2, middle + width / 2)
    figure = Figure(figsize=(12, 2 * len(windows)), layout="constrained")
    for axis, (part, (first, last)) in zip(
        figure.subplots(len(windows), squeeze=False)[:, 0], windows.items(), strict=True
    ):
        for row, lane in enumerate(lanes):
            seen = [(start, long) for start, long in spans[lane] if start < last and start + long > first]
            axis.broken_barh(
                seen,
                (row - 0.4, 0.8),
                facecolors=f"C{LANES.index(lane)}",
                edgecolor="white",
                linewidth=0 if part == "step" else 0.3,
            )
        axis.set(xlim=(first, last), ylim=(len(lanes) - 0.5, -0.5), title=part)
        axis.set_yticks(range(len(lanes)), lanes)
    figure.supxlabel("milliseconds")
    path = file.with_name(file.name.removesuffix(".trace.json.gz") + ".png")
    figure.savefig(path, dpi=110)
    return path
