"""Tuned rows: measured plans, stored as JSON lines in one file a device. The user's rows come before the package's."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
from importlib import resources
from typing import Any

import jax

from jaxops._lib.arrays.checks import type_name
from jaxops._lib.planning import jit_keys
from jaxops._lib.planning.cache_files import cache_folder, write_whole
from jaxops._lib.planning.device import Device, warn_once


def user_folder() -> pathlib.Path:
    return cache_folder("tuned")


def user_file(op: str, device: Device) -> pathlib.Path:
    """Where rows measured on this machine for `op` are stored.

    Raises:
      OSError: the user has no cache folder.
    """
    return _file(user_folder(), op, device)


def user_files(op: str = "*") -> list[pathlib.Path]:
    """The files of rows measured on this machine, or copied to it, for one op or all.

    Raises:
      OSError: the folder cannot be looked at.
    """
    with contextlib.suppress(FileNotFoundError), os.scandir(user_folder()):
        return sorted(user_folder().glob(f"{op}/*.jsonl"))
    return []


def check_can_store(op: str, device: Device) -> None:
    """
    Raises:
      OSError: rows of `op` cannot be written.
      ValueError: those stored are damaged.
    """
    file = user_file(op, device)
    rows_in(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(file.parent, os.W_OK):
        raise PermissionError(f"{file.parent} cannot be written")


def _seen(op: str, device: Device) -> pathlib.Path | None:
    """The user's file, if there is anything. There may be no home folder, or another user's, as in a container."""
    try:
        file = user_file(op, device)
    except OSError:
        return None
    return file if os.path.lexists(file) else None


def own_rows(op: str, device: Device) -> list[dict]:
    """The user's rows. An op runs without those that cannot be read, and a warning says so once."""
    file = _seen(op, device)
    try:
        if file is None:
            return []
        if not file.is_file():
            raise OSError(f"{file} is no file")
        return rows_in(file)
    except (OSError, ValueError) as error:
        warn_once(f"jaxops goes on without your own tuned rows of {op}: {error}")
        return []


def _file(folder: pathlib.Path, op: str, device: Device) -> pathlib.Path:
    return folder / op / f"{device.slug}.jsonl"


def rows_in(file) -> list[dict]:
    """A file's rows; none if there is no such file.

    Raises:
      ValueError: a line is no JSON object.
      OSError: the file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8-sig") if file.is_file() else ""
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        if wrong := [row for row in rows if not isinstance(row, dict)]:
            raise ValueError(f"{wrong[0]!r} is no row")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}): delete it; its rows must be measured again.") from error
    return rows


def use_rows(source: str | os.PathLike) -> Any:
    """Chooses the tuned rows that plans use inside `with use_rows(source):`, in this thread. Functions compiled with
    other rows are traced again.

    By default your own rows are read before the package's. In a job of several processes they are ignored, and a
    warning says so once: each process would read the cache directory of its own machine, and processes that run
    different programs can deadlock.

    >>> import jax.numpy as jnp, jaxops
    >>> from jaxops.tuning import use_rows
    >>> with use_rows("shipped"):
    ...     jaxops.adaln(jnp.ones((4, 8)), jnp.zeros((1, 8)), jnp.ones((1, 8))).shape
    (4, 8)

    Args:
      source: "shipped": only the package's rows. "user": your own rows first, also in a job of several processes, whose
        cache directories must then hold the same files. A path: the rows of a folder like `jaxops/tuned` in the cache
        directory first, with a file <op>/<device>.jsonl for each op and device; all processes should read the same one.

    Raises:
      ValueError: no such folder, or no rows in it.
      TypeError: source is neither a string nor a path.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"source is {type_name(source)}; write 'shipped', 'user' or the path of a folder of tuned rows."
        )
    if source in ("shipped", "user"):
        return jit_keys.rows_source(source)
    folder = pathlib.Path(source)
    with contextlib.suppress(OSError, RuntimeError):  # of expanduser, and of links that form a circle
        folder = folder.expanduser().resolve()
    if not any(folder.glob("*/*.jsonl")):
        raise ValueError(
            f"source={str(source)!r}: no folder with rows, <op>/<device>.jsonl. "
            "Write 'shipped', 'user' or the path of such a folder."
        )
    return jit_keys.rows_source(folder)


def tuned_rows(op: str, device: Device, *parts: str) -> tuple[dict, ...]:
    """All tuned rows of `op`, and of the ops that it is made of, for the device from the source that `use_rows` chose,
    best first; read once a process."""
    source: Any = jit_keys.rows_source.value
    if source is None:
        # In this order: jax.process_count() starts JAX's backend, which a process that only traces does not need.
        several = jax.distributed.is_initialized() and jax.process_count() > 1
        source = "shipped" if several else "user"
        if several and any(_seen(each, device) for each in (op, *parts)):
            warn_once(
                f"jaxops ignores your own tuned rows ({user_folder()}): this job has {jax.process_count()} processes, "
                "which must all use the same rows. Write `with jaxops.tuning.use_rows(folder):` with a folder that "
                "all of them read, or use_rows('shipped') for no warning."
            )
    return read_rows((op, *parts), device, source)


@functools.cache
def read_rows(ops: tuple[str, ...], device: Device, source: str | pathlib.Path) -> tuple[dict, ...]:
    """The rows of a source, which name their op: "shipped", "user", or a folder's before the shipped ones."""
    found = []
    for op in ops:
        shipped = rows_in(resources.files("jaxops.ops") / op / "tuned" / f"{device.slug}.jsonl")
        own = rows_in(_file(source, op, device)) if isinstance(source, pathlib.Path) else []
        if source == "user":
            own = own_rows(op, device)
        found += [{"op": op} | row for row in (*own, *shipped)]
    return tuple(found)


def store_rows(op: str, device: Device, rows: list[dict], same) -> pathlib.Path:
    """Writes rows into the user's file; each replaces the stored rows for which `same(row, stored)` holds."""
    file = user_file(op, device)
    kept = [old for old in rows_in(file) if not any(same(row, old) for row in rows)]
    write_whole(file, "".join(json.dumps(row) + "\n" for row in [*kept, *rows]))
    read_rows.cache_clear()
    return file


def remove_rows(op: str = "*") -> list[pathlib.Path]:
    """Deletes the user's files of one op, or of all."""
    files = user_files(op)
    for file in files:
        file.unlink()
    read_rows.cache_clear()
    return files


def export_rows(folder: pathlib.Path, op: str = "*") -> list[pathlib.Path]:
    """Copies the user's files of one op, or of all, to a folder that `use_rows` takes.

    Raises:
      FileExistsError: it has such a file; nothing is copied.
    """
    targets = {file: folder / file.relative_to(user_folder()) for file in user_files(op)}
    if there := [str(target) for target in targets.values() if target.exists()]:
        raise FileExistsError(f"{', '.join(there)} exists: name another folder.")
    for file, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return [*targets.values()]
