"""What the tools write to the terminal: literally, in any encoding."""

import io
import sys
from typing import Any

from rich.console import Console


def console(**how: Any) -> Console:
    """Prints names of a user's programs and files as they are: no markup, no emoji codes."""
    return Console(markup=False, emoji=False, **how)


def show_any_text() -> None:
    """From now on "?" stands for what the terminal's encoding does not have, instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def as_text(shown: Any, width: int = 130) -> str:
    """What a terminal would show, without colours."""
    text = io.StringIO()
    console(file=text, width=width, color_system=None).print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
