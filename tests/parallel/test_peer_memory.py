"""Several processes: what they make is what one makes; and where their GPUs cannot reach each other's memory, why."""

import os
import re
import socket
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxops.parallel import peer_memory, peer_memory_missing, plan
from tests.devices import needs_two
from tests.parallel.process_run import everything


@needs_two
@pytest.mark.parametrize("one_each", [{"JAX_NUM_CPU_DEVICES": "1"}, pytest.param(None, marks=pytest.mark.gpu)])
def test_two_processes(one_each, tmp_path, monkeypatch):
    """Of one device each, in the same ways, they make the bits of one process with two devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    # Importing what the tests share asks for the devices, before which the processes must be connected.
    code = "import sys, jax; jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]));"
    code += "from tests.parallel.process_run import save; save(sys.argv[3])"
    start = lambda number: subprocess.Popen(
        [sys.executable, "-c", code, address, str(number), str(tmp_path / "found.npz")],
        cwd=Path(__file__).parents[2],
        env=os.environ | (one_each or {"CUDA_VISIBLE_DEVICES": str(number)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started = [start(number) for number in range(2)]
    printed = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(printed)
    found = dict(np.load(tmp_path / "found.npz"))
    missing = str(found.pop("missing"))
    assert bool(missing) == (one_each is not None or peer_memory.nccl_version() < peer_memory.OLDEST), missing
    assert one_each is not None or peer_memory.nccl_version(), "GPUs without NCCL"
    monkeypatch.setattr(plan, "peer_memory_missing", lambda: missing)
    want = everything(2)
    assert found.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(found[name], array, name)


@pytest.mark.parametrize(
    ("domains", "processes", "version", "why"),
    [
        ([0, 0], 1, (), ""),
        ([0, 0], 2, (2, 29, 2), ""),
        ([0, 0], 2, (2, 30, 0), ""),
        ([0, 0], 2, (2, 28, 9), r"need NCCL 2\.29\.2 or newer, and this is 2\.28\.9: pip install -U nvidia-nccl-cu13"),
        ([0, 0], 2, (), "no NCCL was found"),
        ([0, 1], 2, (2, 30, 0), "these are on 2 hosts"),
        ([None, None], 2, (2, 30, 0), "these are on 2 hosts"),  # nothing is known: a host a process
    ],
)
def test_what_is_missing(domains, processes, version, why, monkeypatch):
    known = [{} if domain is None else {"partition_index": domain} for domain in domains]
    devices = [types.SimpleNamespace(process_index=i % processes, **more) for i, more in enumerate(known)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(peer_memory, "nccl_version", lambda: version)
    assert re.fullmatch(f".*{why}.*" if why else "", peer_memory_missing())
