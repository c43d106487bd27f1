"""The public functions against their jaxtyping signatures, in a process of its own: jaxtyping_process.py says why."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def test_jaxtyping_signatures():
    pytest.importorskip("beartype")
    pytest.importorskip("jaxtyping")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/house/jaxtyping_process.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
