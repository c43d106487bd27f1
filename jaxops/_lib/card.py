"""Whether other processes use the GPU or its clocks are lowered: both make measured times too long."""

import os
import shutil
import subprocess

from jaxops._lib.planning.device import current_device, default_number

# What nvidia-smi calls the reasons for low clocks that are no part of normal work. The power cap is: large products
# reach it.
_SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


def disturbance() -> str:
    """What makes times on JAX's default device too long now, as a clause; "" for nothing.

    Nothing is known, and so "", where nvidia-smi is missing or does not answer.
    """
    if current_device().platform != "gpu" or shutil.which("nvidia-smi") is None:
        return ""
    number = default_number()
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    card = visible[number] if len(visible) > number else str(number)
    processes = _ask(card, "--query-compute-apps=pid")
    if len(processes) > 1:  # this one; in a container its number is another one than here
        return f"{len(processes)} processes run on GPU {card}"
    reasons = ",".join(f"clocks_throttle_reasons.{name}" for name in _SLOWED)
    states = [word.strip() for line in _ask(card, f"--query-gpu={reasons}") for word in line.split(",")]
    slow = [name for name, state in zip(_SLOWED, states, strict=False) if state == "Active"]
    return f"GPU {card} runs at lower clocks ({', '.join(slow)})" if slow else ""


def _ask(card: str, query: str) -> list[str]:
    """nvidia-smi's lines; none where it fails."""
    command = ["nvidia-smi", "-i", card, query, "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    return [line for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []
