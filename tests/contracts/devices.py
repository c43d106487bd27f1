"""The table of docs/plans.md, the backend of "auto" by op and device: `python -m tests.contracts.devices` writes it."""

import importlib
import pathlib
import re
from unittest import mock

from jaxops._lib.planning import device as device_module
from jaxops._lib.planning.device import Device
from jaxops.described import descriptions

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/plans.md"
# By JAX's names: no NVIDIA GPU or an old one, then compute capability 8.0, 8.9, 9.0 and 10.0.
DEVICES = {
    "CPU": Device("cpu", "cpu"),
    "TPU": Device("TPU v5e", "tpu"),
    "MI300X": Device("AMD Instinct MI300X", "gpu"),
    "V100": Device("Tesla V100-SXM2-16GB", "gpu"),
    "A100": Device("NVIDIA A100-SXM4-80GB", "gpu"),
    "L4": Device("NVIDIA L4", "gpu"),
    "RTX 4090": Device("NVIDIA GeForce RTX 4090", "gpu"),
    "H100": Device("NVIDIA H100 80GB HBM3", "gpu"),
    "H200": Device("NVIDIA H200", "gpu"),
    "B200": Device("NVIDIA B200", "gpu"),
}


def problems() -> dict[str, tuple]:
    """(module of make_plan, problem) by what a row is called. Functions with the same problem share a row."""
    rows: dict[tuple, list[str]] = {}
    for folder, description in descriptions().items():
        for function in description.functions:
            if function.problem is not None:
                rows.setdefault((folder, function.problem), []).append(f"`{function.name}`")
    modules = {key: importlib.import_module(type(key[1]).__module__) for key in rows}
    return {", ".join(names): (modules[key], key[1]) for key, names in rows.items()}


def table() -> str:
    lines = [f"| op | {' | '.join(DEVICES)} |", "|---" * (len(DEVICES) + 1) + "|"]
    with mock.patch.object(
        device_module, "gluon_missing", return_value=""
    ):  # as with Python 3.12 and jax-triton, whatever runs here
        for name, (module, problem) in problems().items():
            lines.append(
                f"| {name} | {' | '.join(module.make_plan(problem, device).backend for device in DEVICES.values())} |"
            )
    return "\n".join(lines)


def written() -> str:
    """What docs/plans.md has."""
    found = re.search(r"^\| op \| CPU(?:.*\n)+?(?=\n|\Z)", DOCUMENT.read_text(), re.MULTILINE)
    return found[0].rstrip() if found else ""


if __name__ == "__main__":
    DOCUMENT.write_text(DOCUMENT.read_text().replace(written(), table()))
