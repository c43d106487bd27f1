"""The benchmark of offloading: its smoke run, and what it works out from events and from what batches need."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness
from benchmarks.harness.traces import Event, draw_trace, read_trace, write_trace
from benchmarks.training import bench_offload
from benchmarks.training.bench_offload import JAX_REMAT, KEEP, OFFLOAD, hidden_copies, largest, without_jaxops
from jaxops.offload import Policy
from models import layers
from tests.anew import traced_anew
from tests.command_line import run


def test_smoke(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "write_dense", lambda *_: 0.125)
    result = run(bench_offload.main, "--smoke", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    rows = [
        row
        for row in map(json.loads, (tmp_path / "offload.jsonl").read_text().splitlines())
        if row["op"] == "train_step"
    ]
    kept, jax_remat, offloaded = rows
    assert [(row["name"], row["backend"]) for row in rows] == [
        ("decoder_smoke", KEEP),
        ("decoder_smoke", JAX_REMAT),
        ("decoder_smoke", OFFLOAD),
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


def test_hidden_copies():
    """Kernels from 0 to 10, 5 to 20 and 30 to 40 on two streams."""
    events = [Event("gemm", 0, 10), Event("gemm", 5, 15), Event("add", 30, 10)]
    events += [
        Event("MemcpyD2H", 15, 10),
        Event("MemcpyD2H", 35, 10),
        Event("MemcpyH2D", 0, 20),
        Event("MemcpyD2D", 50, 10),
    ]
    assert hidden_copies(events) == {"host": [20, 0.5], "device": [20, 1.0]}
    assert hidden_copies([]) == {"host": [0, 0.0], "device": [0, 0.0]}


def test_traces(tmp_path):
    """Spans of each lane are read back from the first event on; the picture has step, forward and backward."""
    events = [
        Event("gemm", 100, 10),
        Event("MemcpyD2H", 105, 10),
        Event("MemcpyD2D", 112, 2),
        Event("MemcpyH2D", 120, 20),
        Event("gemm", 115, 30),
    ]
    file = tmp_path / "offload_tiny.trace.json.gz"
    write_trace(events, file)
    assert read_trace(file) == sorted(
        (event._replace(start_us=event.start_us - 100) for event in events), key=lambda event: event.start_us
    )
    assert [event.lane for event in events] == [
        "kernels",
        "to the host",
        "copies on the device",
        "to the device",
        "kernels",
    ]
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
