"""What is written to the terminal: literally, and whatever becomes of the terminal."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

# They would end a line, or be a command to the terminal; half of a pair stands for a byte that is not UTF-8.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Terminal(Console):
    """Prints what a user gives as it is: no markup, no emoji codes. A reader that has gone ends no run."""

    def __init__(self, **how):
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True, **how)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())  # of what is buffered, which Python writes at its end


def one_line(text: str) -> str:
    """A text with names that a user gave, with escapes for what is no character of a line."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def lines(text: str) -> str:
    """As `one_line`, with the line ends and tabs of a text."""
    return re.sub(r"[^\n\t]+", lambda part: one_line(part[0]), text)


def first_of(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first `most` of them, and how many more there are."""
    return between.join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def show_any_text() -> None:
    """From now on "?" stands for what the terminal's encoding does not have, instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
