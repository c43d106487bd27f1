"""Files that jaxops keeps between processes, in the user's cache directory."""

import os
import pathlib

import platformdirs


def cache_folder(name: str) -> pathlib.Path:
    """The folder of one kind of files, which may not exist yet."""
    return platformdirs.user_cache_path("jaxops") / name


def write_whole(file: pathlib.Path, text: str) -> None:
    """Writes a file and the folders above it. A run that is killed leaves the old file, and processes that write it at
    the same time one of theirs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(text)
    part.replace(file)
