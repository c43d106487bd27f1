"""Two processes that train one model: what they compute is what one process computes, only the first prints, and what they save they read, and one process."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

from models.checkpoints import Checkpoints
from models.distributed import initialize, is_first, make_console
from tests.models.mesh_run import DENSE, train

ROOT = Path(__file__).parents[2]


def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.models.mesh_run", coordinator]
    start = lambda i: subprocess.Popen([*command, str(i), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [start(i) for i in range(2)]
    want = train(DENSE, steps=2)
    (printed, error), (other, other_error) = (process.communicate(timeout=120) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], error + other_error
    own_lines = lambda text: [line for line in text.splitlines() if not line.startswith("[Gloo]")]  # XLA's collectives say who has connected
    (line,) = own_lines(printed)
    np.testing.assert_allclose([float(loss) for loss in line.split()], want.loss, rtol=1e-5)
    assert own_lines(other) == []
    with Checkpoints(tmp_path, every=2) as checkpoints:
        params, done = checkpoints.start(jax.tree.map(jnp.zeros_like, want.state.params), resume=True)
    assert done == 2
    for ours, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(want.state.params), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-4)


def test_one_process(capsys):
    assert is_first()
    make_console().print("seen")
    assert capsys.readouterr().out == "seen\n"


def test_nobody_says_who_takes_part(monkeypatch):
    def refuse(*_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)  # itself it only works before anything else
    with pytest.raises(typer.BadParameter, match=r"coordinator_address should be defined.*write --coordinator HOST:PORT"):
        initialize()
