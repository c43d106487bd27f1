"""Folders of files that are written atomically, with checksums in SHA256SUMS, as `sha256sum --check` reads it."""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

NAME = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/]+)")  # " *" is of --binary


def _sum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def replace(file: Path, text: str) -> None:
    """Writes a file atomically: a killed process leaves the old or the new one."""
    new = file.with_name(f".{file.name}.unfinished")
    new.write_text(text, "utf-8", newline="")
    new.replace(file)


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
        # A name is bytes, of any encoding.
        (new / NAME).write_bytes(b"".join(os.fsencode(f"{_sum(file)}  {file.name}\n") for file in files))
        for file in (new / NAME, *files):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def verify(folder: Path) -> None:
    """Refuses files that are missing or changed, if there is a SHA256SUMS."""
    sums = folder / NAME
    if not sums.exists():
        return
    wrong = []
    for number, line in enumerate(os.fsdecode(sums.read_bytes()).removesuffix("\n").split("\n"), 1):
        entry = LINE.fullmatch(line.removesuffix("\r"))
        if entry is None:
            raise ValueError(
                f"{sums}, line {number}: {line[:80]!r} is no checksum and file name. Copy the folder again."
            )
        file = folder / entry[2]
        if not file.exists():
            wrong.append(f"{file} is missing")
        elif _sum(file) != entry[1]:
            wrong.append(f"{file} is not what was written: its SHA-256 is another")
    if wrong:
        raise ValueError(
            f"{'; '.join(wrong)}. Copy the folder again; or, if files were changed on purpose, remove {sums}."
        )
