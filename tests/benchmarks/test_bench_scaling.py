"""The benchmark of training steps over several devices: every code path on tiny models, and how it counts."""

import dataclasses
import json

import jax
import pytest
import typer

from benchmarks import bench_scaling
from jaxops.profiling.trace import Event
from tests.command_line import run
from tests.devices import needs_four

SMOKE = ("--smoke", "--workloads", "lm", "--meshes", "fsdp", "--steps", "5")


@needs_four
def test_smoke_run(tmp_path, monkeypatch):
    """One device, the same batch as the mesh on one device, and the mesh. Experts take thrice as long to compile."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    sizes = bench_scaling.SMOKE["lm"]
    dense = dataclasses.replace(sizes.preset, model=dataclasses.replace(sizes.preset.model, experts=0, top_k=0))
    monkeypatch.setitem(bench_scaling.SMOKE, "lm", sizes._replace(preset=dense))
    result = run(bench_scaling.main, *SMOKE, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    one, whole, mesh = (json.loads(line) for line in (tmp_path / "train_step.jsonl").read_text().splitlines())
    assert [row["mesh"] for row in (one, whole, mesh)] == ["one", "whole", "fsdp=4"]
    assert [row["devices"] for row in (one, whole, mesh)] == [1, 1, 4]
    assert mesh["shape"] == whole["shape"] == one["shape"] | {"T": 4 * one["shape"]["T"]}
    assert mesh["scaling"] == pytest.approx(mesh["tokens_per_s"] / one["tokens_per_s"] / 4, rel=1e-3)
    assert mesh["mfu"] == pytest.approx(mesh["tflops"] / 989.4 / 4, rel=1e-3)
    assert len(mesh["loss"]) == 5
    assert mesh["loss"][-1] < mesh["loss"][0] - 0.1, "it learns"
    assert one["loss"][0] != pytest.approx(mesh["loss"][0], rel=1e-4), "of another batch"
    assert mesh["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert mesh["loss_apart"] < 1e-4
    assert mesh["loss_apart_alone"] == whole["loss_apart_alone"] < 1e-4
    assert mesh["peak_bytes"] < whole["peak_bytes"]


def test_a_time_limit(tmp_path):
    result = run(bench_scaling.main, *SMOKE, "--out", str(tmp_path), "--time-limit", "0")
    assert result.exit_code == 0, result.output
    assert "left out: moe_smoke fsdp=4" in result.output
    assert not list(tmp_path.iterdir())


def test_what_is_exposed():
    """Of device 0 5 of 30 us of collectives beside nothing, of device 1 none: the largest of each is reported."""
    event = lambda name, start, us, device=0: Event(name, start, us, device, "stream")
    events = [event("gemm", 0, 20), event("ncclDevKernel_AllGather", 10, 15), event("MemcpyD2D", 30, 5)]
    events += [event("ncclDevKernel_AllReduce", 25, 0), event("ncclDevKernel_AllReduce", 30, 5), event("gemm", 40, 10)]
    events += [event("gemm", 0, 45, 1), event("ncclDevKernel_AllGather", 10, 15, 1)]
    assert bench_scaling.shares_of(events) == pytest.approx((0.005, 0.020, 0.045, 0.010))


def test_which_process_it_is():
    assert bench_scaling.told("1/2@localhost:1234") == ("localhost:1234", 2, 1)
    for wrong in ("1@localhost:1234", "1/2@localhost", "a/2@localhost:1234"):
        with pytest.raises(typer.BadParameter, match="I/N@HOST:PORT"):
            bench_scaling.told(wrong)
