"""Bandwidth over size: of the device's memory, between the host and the device, and between devices."""

import dataclasses
import io
import itertools
import json
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxops._lib.arrays.checks import check_choice, check_integer
from jaxops.profiling import measuring

Kind = Literal["copy", "read", "write", "host_to_device", "device_to_host", "peer_to_peer"]
_MEMORY: dict[str, str] = {"copy": "copy, -x (read + write)", "read": "read, sum", "write": "write, fill"}
_LINKS: dict[str, str] = {
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "peer_to_peer": "device to device",
}
_PANELS = {"Device memory": _MEMORY, "Transfers, by wall time": _LINKS}
KINDS = (*_MEMORY, *_LINKS)
_NEEDED = 4  # times a size: the source, its part, a result of the warm-up and a measured one


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured size.

    Attributes:
      kind: what was measured, as of `bandwidth`.
      bytes: of the array; a copy moves twice as many.
      us: of one call, the median.
      gbps: bytes moved in that time.
      devices: numbers of the sending and the receiving one of "peer_to_peer"; else None.
    """

    kind: Kind
    bytes: int
    us: float
    gbps: float
    devices: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """The result of `bandwidth`. `print` shows it as a table.

    Attributes:
      device: the card's name.
      points: in the order of kinds, pairs of devices and sizes.
      host_memory: of transfers to and from the host, "pinned" or "pageable"; None without them.
      l2_bytes: the card's L2 cache; None if unknown.
      jax: its version.
      driver: NVIDIA's; None if unknown.
      date: of the measurement.
    """

    device: str
    points: tuple[Point, ...]
    host_memory: str | None
    l2_bytes: int | None
    jax: str
    driver: str | None
    date: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def _series(self) -> dict[str, dict[int, list[Point]]]:
        """By kind and size; several points are those of pairs of devices."""
        found: dict[str, dict[int, list[Point]]] = {}
        for point in self.points:
            found.setdefault(point.kind, {}).setdefault(point.bytes, []).append(point)
        return found

    def _label(self, kind: str) -> str:
        if kind == "peer_to_peer":
            pairs = len({point.devices for point in self.points if point.kind == kind})
            return f"{_LINKS[kind]} ({pairs} pairs)"
        host = f" ({self.host_memory})" if kind in _LINKS else ""
        return (_MEMORY | _LINKS)[kind] + host

    def __rich__(self) -> Any:
        from rich.table import Table

        series = self._series()
        table = Table("array", title=f"{self.device}: GB/s", caption=self._caption(), caption_justify="left")
        for kind in series:
            table.add_column(self._label(kind), justify="right")
        for size in sorted({point.bytes for point in self.points}):
            table.add_row(size_text(size), *(_range_text(by_size.get(size, [])) for by_size in series.values()))
        return table

    def _caption(self) -> str:
        lines = [f"L2 cache: {size_text(self.l2_bytes)}; smaller arrays stay in it."] if self.l2_bytes else []
        peers = [point for point in self.points if point.kind == "peer_to_peer"]
        if peers:
            most = max(point.bytes for point in peers)
            slowest = min((point for point in peers if point.bytes == most), key=lambda point: point.gbps)
            assert slowest.devices is not None
            pair = f"{slowest.devices[0]} to {slowest.devices[1]}, {_rate_text(slowest.gbps)} GB/s"
            lines.append(f"Pairs: slowest to fastest. Slowest at {size_text(most)}: {pair}.")
        return "\n".join([*lines, f"JAX {self.jax}, driver {self.driver or 'unknown'}, {self.date}"])

    def __str__(self) -> str:
        from jaxops._lib.terminal import console

        text = io.StringIO()
        console(file=text, width=120, color_system=None).print(self.__rich__())
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def draw(self, file: str | pathlib.Path) -> pathlib.Path:
        """Draws GB/s over the array's size to a PNG, a line a kind: the device's memory above, transfers below. Of
        pairs of devices the line is the median, with a band from the slowest to the fastest.

        Raises:
          ImportError: matplotlib is missing.
          ValueError: there are no points.
        """
        if not self.points:
            raise ValueError("no size was measured: there is nothing to draw.")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("draw needs matplotlib: pip install 'jaxops[bench]'.") from error
        series = self._series()
        panels = [(title, [kind for kind in series if kind in kinds]) for title, kinds in _PANELS.items()]
        panels = [(title, kinds) for title, kinds in panels if kinds]
        figure = Figure(figsize=(9, 0.6 + 3.4 * len(panels)), layout="constrained")
        figure.suptitle(f"{self.device}: bandwidth by size", fontweight="bold")
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axis, (title, kinds) in zip(axes, panels, strict=True):
            axis.set_title(title, loc="left", fontsize=10)
            self._draw_panel(axis, {kind: series[kind] for kind in kinds})
        axes[-1].set_xlabel("size of the array")
        figure.savefig(file, format="png", dpi=130)
        return pathlib.Path(file)

    def _draw_panel(self, axis: Any, series: dict[str, dict[int, list[Point]]]) -> None:
        for number, (kind, by_size) in enumerate(series.items()):
            _draw_line(axis, by_size, self._label(kind), f"C{number}")
        sizes = sorted({size for by_size in series.values() for size in by_size})
        axis.set_ylabel("GB/s")
        axis.set_ylim(bottom=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [size_text(size) for size in sizes], fontsize=8)
        axis.margins(x=0.08, y=0.12)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if self.l2_bytes and not set(series).isdisjoint(_MEMORY) and sizes[0] < self.l2_bytes < sizes[-1]:
            axis.axvline(self.l2_bytes, color="0.5", linestyle="--", linewidth=1)
            label = f" L2 cache, {size_text(self.l2_bytes)}"
            axis.text(self.l2_bytes, 0.03, label, transform=axis.get_xaxis_transform(), fontsize=8, color="0.4")
        axis.legend(fontsize=8, frameon=False)


def _draw_line(axis: Any, by_size: dict[int, list[Point]], label: str, color: str) -> None:
    sizes = sorted(by_size)
    rates = [[point.gbps for point in by_size[size]] for size in sizes]
    middle = [statistics.median(each) for each in rates]
    reached = f"{label}: {_rate_text(middle[-1])} GB/s at {size_text(sizes[-1])}{', median' * (len(rates[-1]) > 1)}"
    axis.plot(sizes, middle, color=color, marker="o", markersize=3, label=reached)
    axis.fill_between(sizes, [min(each) for each in rates], [max(each) for each in rates], color=color, alpha=0.2)


def size_text(size: int) -> str:
    """As "64 MiB"."""
    power = min(3, max(0, (size.bit_length() - 1) // 10))
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _rate_text(gbps: float) -> str:
    return f"{gbps:,.0f}" if gbps >= 100 else f"{gbps:.3g}"


def _range_text(points: Sequence[Point]) -> str:
    rates = [point.gbps for point in points]
    return " to ".join(dict.fromkeys((_rate_text(min(rates)), _rate_text(max(rates))))) if rates else ""


def bandwidth(
    sizes: Sequence[int] | None = None, *, kinds: Sequence[str] | None = None, device: Any = None
) -> Bandwidth:
    """GB/s over size of the device's memory, of transfers between host and device, and between devices.

    Memory: on a GPU the time of kernels (CUPTI), of `-x`, of a sum and of a fill; elsewhere wall time. An array that
    fits in the L2 cache is faster than the memory. Transfers have no kernel: their time is the wall time of several
    blocking calls, each with its launch of some 10 us, which counts at small sizes. The host's memory is pinned where
    the backend has such memory. Devices are this process's, each pair in both directions.

    >>> from jaxops import profiling
    >>> found = profiling.bandwidth([1 << 20, 1 << 22], kinds=["copy", "device_to_host"])
    >>> [(point.kind, point.bytes) for point in found.points]
    [('copy', 1048576), ('copy', 4194304), ('device_to_host', 1048576), ('device_to_host', 4194304)]

    Args:
      sizes: bytes of the arrays, multiples of 4; by default the powers of two from 1 MiB to 2 GiB that fit in the free
        memory, on a CPU to 64 MiB.
      kinds: of "copy", "read", "write", "host_to_device", "device_to_host", "peer_to_peer"; by default all. Of one
        device there are no pairs.
      device: one of this process's `jax.local_devices()`; by default JAX's default device.

    Returns:
      A point a kind, size and pair. `print` shows a table, `draw(file)` makes a picture, `to_json()` a text.

    Raises:
      ValueError: a size is not positive or no multiple of 4, a kind is unknown, or there are none.
      TypeError: sizes are no integers, kinds one string, device no device.
      MemoryError: a size needs more than the device's free memory.
    """
    device = measuring.checked_device(device)
    kinds = _checked_kinds(kinds)
    sizes = _checked_sizes(sizes, device)
    points: list[Point] = []
    host_memory = None
    with jax.default_device(device):
        facts = measuring.facts_of(device)
        source = measuring.normal(sizes[-1] // 4)
        for kind, size in itertools.product(kinds, sizes):
            x = source[: size // 4]
            if kind == "peer_to_peer":
                points += _peer_points(device, x)
            elif kind in _MEMORY:
                call, args, moved, result = _memory_call(kind, x)
                us = measuring.kernel_us(call, args, result, device)
                points.append(_point(kind, size, us, moved))
            else:
                host_memory, to_device, to_host = measuring.host_links(device, x)
                us = measuring.wall_us(*(to_device if kind == "host_to_device" else to_host))
                points.append(_point(kind, size, us, size))
    ordered = sorted(points, key=lambda point: (kinds.index(point.kind), point.devices or (0, 0), point.bytes))
    return Bandwidth(facts.kind, tuple(ordered), host_memory, facts.l2_bytes, **measuring.made())


def _memory_call(kind: str, x: jax.Array) -> tuple[Callable, tuple, int, int]:
    """A program, its operands, the bytes that it moves, and those of its result."""
    if kind == "copy":  # a plain copy may become a memcpy, which has no kernel time
        return jax.jit(jnp.negative), (x,), 2 * x.nbytes, x.nbytes
    if kind == "read":
        return jax.jit(jnp.sum), (x,), x.nbytes, 4
    shape = x.shape
    # The value is an operand: a constant's fill could become a memset.
    return jax.jit(lambda value: jnp.full(shape, value)), (jnp.float32(1.5),), x.nbytes, x.nbytes


def _peer_points(device: Any, x: jax.Array) -> Iterator[Point]:
    """Of each pair of devices, in both directions."""
    for sender, receiver in itertools.permutations(device.client.local_devices(), 2):
        us = measuring.wall_us(measuring.to_other(receiver), jax.device_put(x, sender))
        yield _point("peer_to_peer", x.nbytes, us, x.nbytes, (sender.id, receiver.id))


def _point(kind: Any, size: int, us: float, moved: int, devices: tuple[int, int] | None = None) -> Point:
    return Point(kind, size, round(us, 3), measuring.rounded(moved / us / 1e3), devices)


def _checked_kinds(kinds: Any) -> tuple[str, ...]:
    if kinds is None:
        return KINDS
    if isinstance(kinds, str):
        raise TypeError(f"kinds={kinds!r} is a string; write [{kinds!r}].")
    for kind in kinds:
        check_choice("kinds", kind, KINDS)
    if not kinds:
        raise ValueError(f"kinds is empty: write some of {', '.join(map(repr, KINDS))}.")
    return tuple(kind for kind in KINDS if kind in kinds)


def _checked_sizes(sizes: Any, device: Any) -> list[int]:
    """From small to large."""
    free = measuring.free_bytes(device)
    if sizes is None:
        powers = [1 << power for power in range(20, 32 if measuring.is_gpu(device) else 27)]
        return [size for size in powers if not free or _NEEDED * size <= free] or powers[:1]
    if isinstance(sizes, (int, str)):
        raise TypeError(f"sizes={sizes!r}: write a sequence of bytes, such as [1 << 20, 1 << 30].")
    found = sorted({check_integer("sizes", size, 4) for size in sizes})
    if not found:
        raise ValueError("sizes is empty: write bytes, such as [1 << 20, 1 << 30].")
    if odd := [size for size in found if size % 4]:
        raise ValueError(f"sizes has {odd[0]}; the arrays are float32: write multiples of 4.")
    if free and _NEEDED * found[-1] > free:
        raise MemoryError(
            f"sizes has {size_text(found[-1])}, of which {_NEEDED} times as much is needed; {device.device_kind} has "
            f"{free / 1e9:.1f} GB free."
        )
    return found
