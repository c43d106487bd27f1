"""Inspections as text, and as rich's tables."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxops.inspecting.choices import brief

if TYPE_CHECKING:
    from jaxops.inspecting.inspection import Inspection, SideBySide

MOST_KERNELS = 20
NOTES = ("",)  # columns of a list


@dataclasses.dataclass(frozen=True)
class Section:
    """A table with a title. Columns whose head ends in a space are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sections(found: "Inspection") -> list[Section]:
    return [
        Section(f"jaxops.{found.op} on {found.device}", (), ()),
        _arguments(found),
        _choices(found),
        *_programs(found),
        _errors(f"Errors, compared {found.reference}", found),
        _values(found),
        *_ragged(found),
        *_kept(found),
        *_notes(found.notes),
    ]


def sections_of_two(two: "SideBySide") -> list[Section]:
    first, second = two.first, two.second
    notes = [note for note in first.notes if note in second.notes]
    for label, each in zip(two.labels, (first, second), strict=True):
        notes += [f"{label}: {note}" for note in each.notes if note not in notes]
    return [
        Section(f"jaxops.{first.op} on {first.device}: {two.labels[0]} beside {two.labels[1]}", (), ()),
        _arguments(first),
        *(
            dataclasses.replace(_choices(each), title=f"Plan with {label}")
            for label, each in zip(two.labels, (first, second), strict=True)
        ),
        _times_of_two(two),
        _errors_of_two(two),
        *_ragged(first),
        *_kept_of_two(two),
        *_notes(notes),
    ]


def _arguments(found: "Inspection") -> Section:
    rows = [(a.name, _shape(a.shape), a.dtype, a.device, _bytes(a.bytes)) for a in found.arguments]
    rows += [(name, brief(value), "", "", "") for name, value in found.static.items()]
    return Section("Arguments", ("name", "shape", "dtype", "device", "bytes "), tuple(rows))


def _choices(found: "Inspection") -> Section:
    rows, last = [], None
    for each in found.choices:
        if each.op != last:
            rows.append((each.op, "", brief(each.problem), ""))
        last = each.op
        rows.append(("", each.name, brief(each.value), each.why))
    return Section("Plan" if rows else "Plan: none, the op is plain JAX", ("of", "what", "chosen", "why"), tuple(rows))


def _programs(found: "Inspection") -> Iterable[Section]:
    columns = ("pass", "time ", "clock", "compile ", "FLOPs ", "TFLOP/s ", "bytes ", "GB/s ", "of ceiling ")
    rows = tuple(
        (
            p.name, _us(p.us), "device" if p.on_device else "host", f"{p.compile_s:.2f} s", _count(p.flops),
            _number(p.tflops), "-" if p.bytes is None else _bytes(p.bytes), _number(p.gbps), _share(p.of_ceiling),
        )
        for p in found.programs
    )  # fmt: skip
    yield Section("Time", columns, rows)
    for p in found.programs:
        if p.kernels:
            shown = [(kernel.name, _us(kernel.us)) for kernel in p.kernels[:MOST_KERNELS]]
            rest = p.kernels[MOST_KERNELS:]
            shown += [(f"{len(rest)} more", _us(sum(kernel.us for kernel in rest)))] if rest else []
            yield Section(f"{len(p.kernels)} kernels of the {p.name}", ("name", "time "), tuple(shown))


def _errors(title: str, found: "Inspection") -> Section:
    columns = ("of", "max / RMS ", "RMS / RMS ", "not finite in one ", "differ ")
    rows = tuple((e.name, f"{e.max:.1e}", f"{e.rms:.1e}", str(e.one_sided), str(e.differ)) for e in found.errors)
    return Section(title if rows else "Errors: nothing was compared", columns, rows)


def _values(found: "Inspection") -> Section:
    columns = ("of", "shape", "dtype", "NaN ", "Inf ", "min ", "max ", "mean ")
    rows = tuple(
        (v.name, _shape(v.shape), v.dtype, str(v.nans), str(v.infs), *(f"{x:.4g}" for x in (v.min, v.max, v.mean)))
        for v in found.values
    )
    return Section("Values (min, max and mean of the finite ones)", columns, rows)


def _ragged(found: "Inspection") -> Iterable[Section]:
    if not found.ragged:
        return
    columns = ("offsets", "groups ", "empty ", "rows ", "outside ", "largest ", "largest / mean ", "dropped ")
    rows = []
    for r in found.ragged:
        counts = (r.groups, r.empty, r.rows, r.outside, r.largest)
        rows.append((r.name, *map(str, counts), _number(r.skew), "-" if r.dropped is None else str(r.dropped)))
        rows += [(f"  NOT VALID: {problem}", *[""] * 7) for problem in r.problems]
    yield Section("Groups", columns, tuple(rows))


def _kept(found: "Inspection") -> Iterable[Section]:
    if found.kept:
        rows = tuple((each.name, _bytes(each.bytes), _listed(each.arrays)) for each in found.kept)
        title = f"Kept for the backward: {_bytes(found.kept_bytes)} beside the arguments"
        yield Section(title, ("name", "bytes ", "arrays"), rows)


def _notes(notes: Sequence[str]) -> Iterable[Section]:
    if notes:
        yield Section("Notes", NOTES, tuple((note,) for note in notes))


def _times_of_two(two: "SideBySide") -> Section:
    columns = ("pass", *(f"{label} " for label in two.labels), "first / second ")
    others, rows = {p.name: p for p in two.second.programs}, []
    for p in two.first.programs:
        if (q := others.get(p.name)) is None:
            continue
        ratio = p.us / q.us if p.us and q.us else None
        rows.append((f"{p.name}, {'device' if p.on_device else 'host'}", _us(p.us), _us(q.us), _number(ratio)))
        if p.on_device and q.on_device:
            rows.append((f"{p.name}, of ceiling", _share(p.of_ceiling), _share(q.of_ceiling), ""))
            rows.append((f"{p.name}, kernels", str(len(p.kernels)), str(len(q.kernels)), ""))
        rows.append((f"{p.name}, compile", f"{p.compile_s:.2f} s", f"{q.compile_s:.2f} s", ""))
    return Section("Time", columns, tuple(rows))


def _errors_of_two(two: "SideBySide") -> Section:
    columns = ("max error / RMS of", *(f"{label} " for label in two.labels), "between them ", "not finite in one ",
               "differ ")  # fmt: skip
    errors = [{error.name: f"{error.max:.1e}" for error in each.errors} for each in (two.first, two.second)]
    rows = tuple(
        (d.name, *(known.get(d.name, "-") for known in errors), f"{d.max:.1e}", str(d.one_sided), str(d.differ))
        for d in two.differences
    )
    return Section(f"Errors, compared {two.first.reference}", columns, rows)


def _kept_of_two(two: "SideBySide") -> Iterable[Section]:
    sides = [{each.name: each.bytes for each in found.kept} for found in (two.first, two.second)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    rows = tuple((name, *(_bytes(side[name]) if name in side else "-" for side in sides)) for name in names)
    if rows:
        yield Section("Kept for the backward", ("name", *(f"{label} " for label in two.labels)), rows)


def _listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:,.1f} us" if us < 1e4 else f"{us / 1e3:,.1f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _bytes(count: float) -> str:
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def _count(value: float | None) -> str:
    return "-" if value is None else _scaled(value, ("", "k", "M", "G", "T"))


def _scaled(value: float, units: Sequence[str]) -> str:
    number = 0
    while value >= 1e4 and number < len(units) - 1:
        value, number = value / 1e3, number + 1
    return f"{value:,.0f} {units[number]}".rstrip() if number == 0 else f"{value:,.1f} {units[number]}"


def as_text(found: Sequence[Section]) -> str:
    """Plain text, as wide as it is."""
    blocks = []
    for section in found:
        lines = [section.title]
        if section.columns == NOTES:
            lines += [f"  - {note}" for (note,) in section.rows]
        elif section.rows:
            cells = [tuple(head.strip() for head in section.columns), *section.rows]
            # A row of one cell (a problem) widens no column.
            wide = [[row[i] for row in cells if any(row[1:])] for i in range(len(section.columns))]
            widths = [max(map(len, column), default=0) for column in wide]
            for row in cells:
                parts = [
                    cell.rjust(width) if head.endswith(" ") else cell.ljust(width)
                    for cell, width, head in zip(row, widths, section.columns, strict=True)
                ]
                lines.append("  " + "  ".join(parts).rstrip())
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def as_rich(found: Sequence[Section]) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = []
    for section in found:
        if not section.rows or section.columns == NOTES:
            parts += [Text(section.title, style="bold"), *(Text(f"- {note}") for (note,) in section.rows)]
            continue
        table = Table(
            title=Text(section.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for head in section.columns:
            table.add_column(head.strip(), justify="right" if head.endswith(" ") else "left", overflow="fold")
        for row in section.rows:
            style = "bold red" if "NOT VALID" in row[0] else None
            table.add_row(*(Text(cell) for cell in row), style=style)
        parts.append(table)
    return Group(*parts)
