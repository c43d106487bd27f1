"""What nvidia-smi says of the card, from a script in its place."""

import os

import pytest

from jaxops._lib import card
from jaxops._lib.planning.device import Device


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch):
    monkeypatch.setattr(card, "current_device", lambda: Device("NVIDIA Test", "gpu"))


@pytest.mark.parametrize(
    ("processes", "states", "visible", "found"),
    [
        (1, "Not Active, Not Active, Not Active, Not Active", "", ""),
        (0, "Not Active, Not Active, Not Active, Not Active", "GPU-5", ""),
        (2, "Not Active, Not Active, Not Active, Not Active", "", "2 processes run on GPU 0"),
        (
            1,
            "Not Active, Active, Not Active, Not Active",
            "GPU-5,GPU-6",
            "GPU GPU-5 runs at lower clocks (hw_thermal_slowdown)",
        ),
        (1, "[N/A], [N/A], [N/A], [N/A]", "", ""),
    ],
)
def test_disturbance(tmp_path, monkeypatch, processes, states, visible, found):
    smi = tmp_path / "nvidia-smi"
    pids = "\n".join(str(1000 + i) for i in range(processes))
    smi.write_text(f'#!/bin/sh\ncase "$*" in *compute-apps*) printf "{pids}";; *) echo "{states}";; esac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert card.disturbance() == found


def test_without_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert card.disturbance() == ""
    (tmp_path / "nvidia-smi").write_text("#!/bin/false\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert card.disturbance() == ""
