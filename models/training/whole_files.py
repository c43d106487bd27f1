"""Folders of files that are written atomically, with checksums in SHA256SUMS, as `sha256sum --check` reads it."""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

NAME = "SHA256SUMS"
# As sha256sum writes a line: after a backslash the name is escaped, so that it has no line end. " *" is of --binary.
LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/]+)|\\([0-9a-f]{64}) [ *]((?:[^/\\]|\\[\\nr])+)")
ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}


def _sum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def replace(file: Path, text: str) -> None:
    """Writes a file atomically: a killed process leaves the old or the new one."""
    new = file.with_name(f".{file.name}.unfinished")
    new.write_text(text, "utf-8", newline="")
    new.replace(file)


def _line(file: Path) -> bytes:
    name = file.name.translate(str.maketrans(ESCAPES))
    mark = "" if name == file.name else "\\"
    return os.fsencode(f"{mark}{_sum(file)}  {name}\n")  # a name is bytes, of any encoding


def _entry(line: str) -> tuple[str, str] | None:
    """(checksum, file name), or None."""
    found = LINE.fullmatch(line.removesuffix("\r"))
    if found is None or found[1]:
        return found and (found[1], found[2])
    return found[3], re.sub(r"\\.", lambda escape: {to: name for name, to in ESCAPES.items()}[escape[0]], found[4])


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A new folder to write into. At the end its files move to `folder` (created if missing), over equal names.

    SHA256SUMS moves first: if the process is killed in between, `verify` detects the other files.
    """
    new = folder / ".unfinished"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        files = sorted(new.iterdir())
        (new / NAME).write_bytes(b"".join(map(_line, files)))
        for file in (new / NAME, *files):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def verify(folder: Path) -> None:
    """Does nothing without SHA256SUMS.

    Raises:
      ValueError: a file is missing or changed; all of them are named.
    """
    sums = folder / NAME
    if not sums.exists():
        return
    wrong = []
    for number, line in enumerate(os.fsdecode(sums.read_bytes()).removesuffix("\n").split("\n"), 1):
        entry = _entry(line)
        if entry is None:
            raise ValueError(
                f"{sums}, line {number}: {line[:80]!r} is no checksum and file name. Copy the folder again."
            )
        file = folder / entry[1]
        if not file.exists():
            wrong.append(f"{file} is missing")
        elif _sum(file) != entry[0]:
            wrong.append(f"{file} is not what was written: its SHA-256 is another")
    if wrong:
        raise ValueError(
            f"{'; '.join(wrong)}. Copy the folder again; or, if files were changed on purpose, remove {sums}."
        )
