"""Which process writes, and the error if no process knows the others. test_launch.py trains with two."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest
import typer

from models.distributed.processes import initialize, is_first, make_console

ROOT = pathlib.Path(__file__).parents[2]


def test_one_process(capsys):
    assert is_first()
    make_console().print("seen")
    assert capsys.readouterr().out == "seen\n"


def test_kubernetes_needs_its_package():
    """In a process of its own, since `jax.distributed` works once in one."""
    program = "from models.distributed.processes import initialize; initialize()"
    environment = os.environ | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "install jax with the [k8s] extra" in " ".join(done.stderr.split())
    assert "write --coordinator HOST:PORT --processes N --process-id I" in " ".join(done.stderr.split())


def test_nobody_says_who_takes_part(monkeypatch):
    def refuse(*_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)  # itself it only works before anything else
    with pytest.raises(
        typer.BadParameter, match=r"coordinator_address should be defined.*write --coordinator HOST:PORT"
    ):
        initialize()
