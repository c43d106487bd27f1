"""What the tools write to the terminal, in any encoding."""

import io
import sys


def show_any_text() -> None:
    """From now on "?" stands for what the terminal's encoding does not have, instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
