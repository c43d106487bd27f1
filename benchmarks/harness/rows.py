"""The rows that benchmarks write: one JSON line a case and side, with where and with what it was measured."""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
# fmt: off
ROW_KEYS = (
    "op", "pass", "name", "shape", "dtype", "dist", "backend", "us_p50", "us_p20", "us_p80", "of_ceiling", "vs",
    "max_err", "jax", "triton", "driver", "device", "commit", "date",
)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Times:
    """Percentiles over all calls of all rounds, in microseconds."""

    us_p20: float
    us_p50: float
    us_p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Times":
        return cls(*(float(p) for p in np.percentile(np.asarray(samples), (20, 50, 80))))


class Named(NamedTuple):
    """A workload, for `case_of`."""

    name: str
    dims: dict[str, int]


def case_of(op: str, pass_name: str, shape, dtype, dist: str = "") -> dict:
    """What a row says of its case; shape is one of benchmarks/shapes, or `Named`."""
    named = {"op": op, "pass": pass_name, "name": shape.name, "shape": shape.dims}
    return named | {"dtype": np.dtype(dtype).name, "dist": dist}


def label_of(row: dict) -> str:
    """What a row is called in print."""
    keys = ("op", "name", "recipe", "scaling", "layouts", "mask", "dist", "pass")
    return " ".join(row[key] for key in keys if row.get(key))


def make_row(
    case: dict, times: Times, of_ceiling: float | None, vs: dict[str, float], max_err: float | None, **rates
) -> dict:
    """A row. case: op, pass, name, shape, dtype, dist, backend. rates: tflops or gbps, and other facts.

    Raises:
      ValueError: a key of ROW_KEYS is missing.
    """
    rounded = {key: round(value, 2) for key, value in dataclasses.asdict(times).items()}
    more = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in rates.items()}
    ratios = {peer: round(ratio, 3) for peer, ratio in vs.items()}
    row = case | rounded | more | {"of_ceiling": None if of_ceiling is None else round(of_ceiling, 4), "vs": ratios}
    row |= {"max_err": None if max_err is None else float(f"{max_err:.3g}")} | environment()
    if missing := set(ROW_KEYS) - set(row):
        raise ValueError(f"a row lacks {sorted(missing)}: {row}")
    return row


def append_row(file: pathlib.Path, row: dict) -> None:
    """Appends at once: a run that dies keeps its rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def results_folder(out: str, devices: int = 1) -> pathlib.Path:
    """`out`, or benchmarks/results/<device>; of several devices <device>_x<devices>."""
    device = jax.devices()[0].device_kind.lower().replace(" ", "_") + (f"_x{devices}" if devices > 1 else "")
    return pathlib.Path(out) if out else ROOT / "benchmarks" / "results" / device


def ratios(side: str, times: dict[str, Times], own: str) -> dict[str, float]:
    """A row's `vs`: each peer's time over the own one; empty for a peer."""
    if side != own:
        return {}
    return {peer: other.us_p50 / times[side].us_p50 for peer, other in times.items() if peer != own}


@functools.cache
def environment() -> dict[str, str | None]:
    """The part of a row that says where and with what it was measured."""
    return {
        "jax": jax.__version__,
        "triton": _version("triton"),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "device": jax.devices()[0].device_kind,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, cwd=ROOT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _commit() -> str:
    """JAXOPS_COMMIT, for a copy of the sources without git; else git's short hash, with + if jaxops/ has changes."""
    if given := os.environ.get("JAXOPS_COMMIT"):
        return given
    commit = _first_line("git", "rev-parse", "--short", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("+" if _first_line("git", "status", "--porcelain", "--", "jaxops") else "")
