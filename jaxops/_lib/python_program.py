"""Runs another Python program inside this process."""

import pathlib
import re
import runpy
import sys
from collections.abc import Sequence


class ProgramError(RuntimeError):
    """The program could not be run, or failed."""


def run_program(words: Sequence[str]) -> None:
    """Runs `[python] -m MODULE ...` or `[python] FILE.py ...`, as Python itself would.

    Raises:
      ProgramError: other words.
    """
    words = list(words)
    if words and re.fullmatch(
        r"python[\d.]*t?(\.exe)?", pathlib.Path(words[0]).name
    ):  # a program may be python_step.py
        del words[0]
    is_module = words[:1] == ["-m"] and len(words) > 1
    if not is_module and not (words and words[0].endswith(".py")):
        raise ProgramError(
            f"{' '.join(words)!r} is no Python program: write 'python -m MODULE ...' or 'python FILE.py'."
        )
    before = sys.argv
    sys.argv = words[1:] if is_module else words
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(pathlib.Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv = before
