"""Files that jaxops keeps between processes, in the user's cache directory."""

import os
import pathlib

import platformdirs


def cache_folder(name: str) -> pathlib.Path:
    """The folder of one kind of files, which may not exist yet.

    Raises:
      OSError: there is none, as for a user without a home folder.
    """
    try:
        folder = platformdirs.user_cache_path("jaxops") / name
    except RuntimeError as error:
        raise FileNotFoundError(f"this user has no home folder: {error}") from error
    if not folder.is_absolute():  # which the XDG specification forbids: it would be another one after a chdir
        raise FileNotFoundError(f"the cache folder {folder} is no absolute path")
    return folder


def write_whole(file: pathlib.Path, text: str) -> None:
    """Writes a file and the folders above it. A run that is killed leaves the old file, and processes that write it at
    the same time one of theirs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
