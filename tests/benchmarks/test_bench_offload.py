"""The benchmark of offloading: its smoke run, and what it works out from events and from what batches need."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness.machine import Ceilings
from benchmarks.harness.traces import draw_trace, lane_of, read_trace, write_trace
from benchmarks.training import bench_offload
from benchmarks.training.bench_offload import JAX_REMAT, KEEP, OFFLOAD, hidden_copies, largest, without_jaxops
from jaxops.offload import Policy
from jaxops.profiling import trace
from models import layers
from tests.anew import traced_anew
from tests.benchmarks.conftest import rows_of
from tests.command_line import run


def test_smoke(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_offload, "measure_ceilings", lambda *_, **__: Ceilings(1.0, 0.125))
    result = run(bench_offload.main, "--smoke", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "offload.jsonl")
    kept, jax_remat, offloaded = rows
    assert [(row["name"], row["backend"]) for row in rows] == [
        ("decoder_smoke", each) for each in (KEEP, JAX_REMAT, OFFLOAD)
    ]
    assert offloaded["loss"] == kept["loss"] == jax_remat["loss"]
    assert offloaded["vs"][KEEP] == pytest.approx(offloaded["tokens_per_s"] / kept["tokens_per_s"], rel=1e-2)
    for row in rows:
        assert row["of_ceiling"] == pytest.approx(row["tflops"] / 0.125, rel=1e-2, abs=1e-4)
    assert set(offloaded["vs"]) == {KEEP, JAX_REMAT}
    assert list(offloaded["needed_bytes"]) == ["2", "4"]


def test_without_jaxops():
    """The layers are scanned by JAX: the same numbers, without custom_vjp."""

    def loss(w):
        return jnp.sum(layers.scan(lambda x, w: (jnp.sin(x @ w), None), jnp.eye(2), w, policy=Policy())[0])

    w = jnp.linspace(0.0, 1.0, 12).reshape(3, 2, 2)
    ours, jaxpr = jax.grad(loss)(w), str(jax.make_jaxpr(loss)(w))
    with without_jaxops(), traced_anew():
        plain, plain_jaxpr = jax.grad(loss)(w), str(jax.make_jaxpr(loss)(w))
    np.testing.assert_allclose(plain, ours, rtol=1e-6)
    assert ("custom_vjp" in jaxpr, "custom_vjp" in plain_jaxpr) == (True, False)
    assert ("remat" in jaxpr, "remat" in plain_jaxpr) == (False, True)


def event_of(name: str, start_us: float, us: float) -> trace.Event:
    return trace.Event(name, start_us, us, device=0, stream="")


def test_hidden_copies():
    """Kernels from 0 to 10, 5 to 20 and 30 to 40 on two streams."""
    events = [event_of("gemm", 0, 10), event_of("gemm", 5, 15), event_of("add", 30, 10)]
    copies = [("MemcpyD2H", 15, 10), ("MemcpyD2H", 35, 10), ("MemcpyH2D", 0, 20), ("MemcpyD2D", 50, 10)]
    events += [event_of(*copy) for copy in copies]
    assert hidden_copies(events) == {"host": [20, 0.5], "device": [20, 1.0]}
    assert hidden_copies([]) == {"host": [0, 0.0], "device": [0, 0.0]}


def test_traces(tmp_path):
    """Spans of each lane are read back from the first event on; the picture has step, forward and backward."""
    spans = [
        ("gemm", 100, 10),
        ("MemcpyD2H", 105, 10),
        ("MemcpyD2D", 112, 2),
        ("MemcpyH2D", 120, 20),
        ("gemm", 115, 30),
    ]
    events = [event_of(*span) for span in spans]
    file = tmp_path / "offload_tiny.trace.json.gz"
    write_trace(events, file)
    moved = [dataclasses.replace(event, start_us=event.start_us - 100) for event in events]
    assert read_trace(file) == sorted(moved, key=lambda event: event.start_us)
    lanes = ["kernels", "to the host", "copies on the device", "to the device", "kernels"]
    assert [lane_of(event) for event in events] == lanes
    before = file.read_bytes()
    write_trace(events, file)
    assert file.read_bytes() == before
    picture = draw_trace(file)
    assert picture.name == "offload_tiny.png"
    assert picture.stat().st_size > 1000


def test_largest():
    needed = {(KEEP, 1): 120, (OFFLOAD, 2): 104, (OFFLOAD, 4): 108}
    assert largest(needed, OFFLOAD, 130) == 15
    assert largest(needed, KEEP, 130) is None
