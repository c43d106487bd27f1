"""Cells of the tables that reports print."""

from rich.table import Table
from rich.text import Text


def table(*titles: str, numbers: tuple[int, int]) -> Table:
    """With right-aligned columns of numbers, from the first to before the second. Names are cut off before numbers."""
    made = Table()
    for i, title in enumerate(titles):
        if numbers[0] <= i < numbers[1]:
            made.add_column(title, justify="right", no_wrap=True)
        else:
            made.add_column(title, no_wrap=True, overflow="ellipsis")
    return made


def cut(name: str, most: int = 42) -> Text:
    """A name that leaves room for numbers: its beginning and its end."""
    return Text(name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}")


def ms_text(us: float) -> str:
    return f"{us / 1e3:,.3f} ms" if us < 1e5 else f"{us / 1e3:,.1f} ms"


def share_text(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def bytes_text(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:.0f} B"
