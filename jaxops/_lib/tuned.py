"""Tuned rows: measured choices, kept as JSON lines, one file a device. The user's rows are read before the shipped ones."""

import functools
import json
import pathlib
from importlib import resources

import platformdirs

from jaxops._lib.device import Device


def user_file(op: str, device: Device) -> pathlib.Path:
    """Where rows measured on this machine for `op` are stored."""
    return platformdirs.user_cache_path("jaxops") / "tuned" / op / f"{device.slug}.jsonl"


def _read(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()] if file.is_file() else []


@functools.cache
def tuned_rows(op: str, device: Device) -> tuple[dict, ...]:
    """Every tuned row of `op` for the device, best source first; read once a process."""
    shipped = resources.files("jaxops.ops") / op / "tuned" / f"{device.slug}.jsonl"
    return (*_read(user_file(op, device)), *_read(shipped))


def store_rows(op: str, device: Device, rows: list[dict], same) -> pathlib.Path:
    """Puts rows into the user's file, each in place of the stored rows for which `same(row, stored)` holds."""
    file = user_file(op, device)
    kept = [old for old in _read(file) if not any(same(row, old) for row in rows)]
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *rows]))
    part.replace(file)  # whole or not at all: a killed tuning run leaves the old file
    tuned_rows.cache_clear()
    return file
