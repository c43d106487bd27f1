"""Tables of plain text, and their cells."""

from collections.abc import Sequence


def table(titles: str, rows: Sequence[Sequence[str]]) -> str:
    """A row a line. titles: with bars between; a column whose title follows a > has numbers, flush right."""
    columns = titles.split("|")
    lines = [[title.removeprefix(">") for title in columns], *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    places = [(">" if title.startswith(">") else "<", width) for title, width in zip(columns, widths, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, (side, width) in zip(line, places, strict=True)).rstrip()
        for line in lines
    )


def cut(name: str, most: int = 42) -> str:
    """A name that leaves room for numbers: its beginning and its end."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"


def ms_text(us: float) -> str:
    return f"{us / 1e3:,.3f} ms" if abs(us) < 1e5 else f"{us / 1e3:,.1f} ms"


def share_text(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def rate_text(rate: float | None) -> str:
    return "" if not rate else f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def bytes_text(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:.0f} B"
