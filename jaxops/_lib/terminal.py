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
