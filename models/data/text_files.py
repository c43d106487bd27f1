"""Text that users have: which files are below a folder, what is in them, and the lines of .jsonl files.

Training data, captions and prompts are all read here. Files are UTF-8 on every machine; a byte order mark is dropped.
"""

import codecs
import contextlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
NO_TEXT = (".json", ".ndjson")  # to learn their punctuation as text is hardly what their owner wants
CONVERT = "Convert it to UTF-8."


def is_json_lines(file: Path) -> bool:
    return file.suffix.lower() == ".jsonl"


def text_files(paths: Sequence[str | Path]) -> list[Path]:
    """The named files; of folders, recursively, those with TEXT_SUFFIXES in sorted order, without hidden ones.

    Links are followed. A folder that is found again, such as one that has a link to itself, is read once.
    """
    if "" in paths:  # of an unset variable of the shell; as a path it is the current folder
        raise ValueError("a path of the text is empty: name a file or a folder, '.' for the current one.")
    files: list[Path] = []
    for path in map(Path, paths):
        with _reading(path):
            if not path.is_dir():
                if not os.path.lexists(path):
                    raise FileNotFoundError(f"{path} does not exist.")
                files.append(path)
                continue
            found = [file for file in below(path) if not (file.name.startswith(".") or file.is_dir())]
            inside = [file for file in found if file.suffix.lower() in TEXT_SUFFIXES]
        if not inside:
            raise FileNotFoundError(
                f"{path} holds no file of {', '.join(TEXT_SUFFIXES)}; a file of another kind must be named itself."
            )
        files += sorted(inside, key=lambda file: file.relative_to(path).as_posix())
    return files


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.strerror is None:
            raise
        raise type(error)(
            f"{error.filename or path} cannot be read: {error.strerror}. Allow it, name another one, or leave it out."
        ) from error


def below(folder: Path) -> Iterator[Path]:
    """Files at any depth, and folders that are not entered: hidden ones, and those that were entered before, as by a
    link. Sorted in each folder.
    """
    entered = set[Path]()

    def inside(folder: Path) -> Iterator[Path]:
        entered.add(folder.resolve())
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") or not path.is_dir() or path.resolve() in entered:
                yield path
            else:
                yield from inside(path)

    with _reading(folder):
        yield from inside(folder)


def read_bytes(file: Path) -> bytes:
    """The content of a regular file: a pipe could be read once only."""
    with _reading(file):
        if file.is_symlink() and not file.exists():
            raise FileNotFoundError(
                f"{file} is a link to {file.readlink()}, which does not exist: repair it, or remove it."
            )
        if file.exists() and not file.is_file():
            raise ValueError(f"{file} is no regular file: name one, or write its content to one.")
        return file.read_bytes()


def read_utf8(file: Path, remedy: str = CONVERT, *, zeros: bool = False) -> bytes:
    """The content of a text file, without a byte order mark; remedy: what to do otherwise, for the error."""
    content = read_bytes(file)
    if file.suffix.lower() in NO_TEXT:
        raise ValueError(
            f"{file} is neither text nor lines by its name: write a JSON object a line into a .jsonl file, or name it "
            ".txt to take its characters as they are."
        )
    at = -1 if zeros else content.find(0)
    wrong = " is zero"
    if at < 0:
        try:
            content.decode()
        except UnicodeDecodeError as error:
            at, wrong = error.start, f", {content[error.start]:#04x}, is not UTF-8"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        at, wrong = 0, " is of the mark of UTF-16 or UTF-32"
    if at >= 0:
        line = 1 + content.count(b"\n", 0, at)
        raise ValueError(f"{file} is no text: line {line:,}, byte {at:,}{wrong}. {remedy}")
    return content.removeprefix(codecs.BOM_UTF8)


def check_text(text: str, what: str) -> str:
    """The text, unless it has a zero byte or a character that no encoder takes; what: its name in errors."""
    if "\0" in text:
        raise ValueError(f"{what} has a zero byte, which ends a document: remove it.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has {text[error.start]!r} as character {error.start:,}, which is none: half of a surrogate pair, "
            "or a byte that is not UTF-8. Write the whole character."
        ) from error
    return text


def lines_of(file: Path) -> Iterator[tuple[str, str]]:
    r"""(its name in errors, the line) of each line that is not blank.

    Lines end with \n or \r\n. JSON strings may have the other characters that `str.splitlines` splits at.
    """
    for number, line in enumerate(io.BytesIO(read_utf8(file, zeros=True)), 1):
        text = line.decode().removesuffix("\n").removesuffix("\r")
        if text.strip():
            yield f"{file}, line {number}", text


class JsonLine(NamedTuple):
    """A line of a .jsonl file: its object, its name in errors, and the error if what is wanted is not in it."""

    given: dict[str, Any]
    source: str
    wrong: str

    def text(self, key: str) -> str:
        """The text under a key, as of `check_text`."""
        if not isinstance(found := self.given.get(key), str):
            raise ValueError(self.wrong)
        return check_text(found, f"{self.source}: the {key}")


def json_lines(file: Path, wanted: str) -> Iterator[JsonLine]:
    """The lines of a .jsonl file that are not blank; wanted: what each must have, for errors."""
    for source, line in lines_of(file):
        wrong = f"{source}: {line[:80]!r} is no JSON object with {wanted}"
        try:
            given = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            is_syntax = isinstance(error, json.JSONDecodeError)
            reason = f"{error.msg} at character {error.pos:,}" if is_syntax else error
            raise ValueError(f"{wrong}: {reason}.") from error
        if not isinstance(given, dict):
            raise ValueError(f"{wrong}.")
        yield JsonLine(given, source, f"{wrong}.")


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice")
        found[key] = value
    return found
