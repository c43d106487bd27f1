"""The benchmark of training steps over several devices: every code path on tiny models, and how it counts."""

import dataclasses

import pytest
import typer

from benchmarks.training import bench_scaling
from benchmarks.training.meshes import file_name, meshes_of
from jaxops.profiling.trace import Event
from tests.benchmarks.conftest import rows_of
from tests.command_line import run
from tests.devices import needs_four

SMOKE = ("--smoke", "--workloads", "lm", "--meshes", "fsdp", "--steps", "5")


@pytest.fixture
def dense(monkeypatch):
    """Experts take thrice as long to compile."""
    for name in ("lm", "30b"):
        sizes = bench_scaling.SMOKE[name]
        preset = dataclasses.replace(sizes.preset, model=dataclasses.replace(sizes.preset.model, experts=0, top_k=0))
        monkeypatch.setitem(bench_scaling.SMOKE, name, sizes._replace(preset=preset))


@needs_four
@pytest.mark.usefixtures("dense")
def test_smoke_run(tmp_path):
    """One device, the same batch as the mesh on one device, and the mesh."""
    result = run(bench_scaling.main, *SMOKE, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    one, whole, mesh = rows_of(tmp_path / "train_step.jsonl")
    assert [row["mesh"] for row in (one, whole, mesh)] == ["one", "whole", "fsdp=4"]
    assert [row["devices"] for row in (one, whole, mesh)] == [1, 1, 4]
    assert mesh["shape"] == whole["shape"] == one["shape"] | {"T": 4 * one["shape"]["T"]}
    assert mesh["scaling"] == pytest.approx(mesh["tokens_per_s"] / one["tokens_per_s"] / 4, rel=1e-3)
    assert mesh["mfu"] == pytest.approx(mesh["tflops"] / 989.4 / 4, rel=1e-3)
    assert mesh["tflops_per_device"] == pytest.approx(mesh["tflops"] / 4, rel=1e-3)
    assert one["tflops_per_device"] == one["tflops"]
    assert len(mesh["loss"]) == 5
    assert mesh["loss"][-1] < mesh["loss"][0] - 0.1, "it learns"
    assert one["loss"][0] != pytest.approx(mesh["loss"][0], rel=1e-4), "of another batch"
    assert mesh["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert mesh["loss_apart"] < 1e-4
    assert mesh["peak_bytes"] < whole["peak_bytes"]


@needs_four
@pytest.mark.usefixtures("dense")
def test_a_model_too_large_for_one_device(tmp_path):
    """Only the meshes run, here a mixture of axes, of another depth and batch."""
    sizes = ["--set", "model.layers=2", "--set", "batch=4"]
    options = ["--workloads", "30b", "--meshes", "tensor=2+fsdp=2", "--steps", "4", *sizes]
    result = run(bench_scaling.main, "--smoke", *options, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    (row,) = rows_of(tmp_path / "train_step.jsonl")
    assert (row["name"], row["mesh"], row["devices"]) == ("large_smoke_2_layers", "fsdp=2,tensor=2", 4)
    assert row["shape"]["layers"] == 2
    assert row["shape"]["T"] == 4 * 4 * bench_scaling.SMOKE["30b"].preset.context
    assert row["set"] == ["model.layers=2", "batch=4"]
    assert row["loss"][-1] < row["loss"][0]
    assert not {"scaling", "loss_apart"} & row.keys()


@needs_four
def test_meshes():
    assert meshes_of("data,fsdp=2+tensor=2,tensor=2+fsdp=2,expert=4") == ["data=4", "fsdp=2,tensor=2", "expert=4"]
    assert [file_name(mesh) for mesh in ("data=4", "fsdp=2,tensor=2")] == ["data", "fsdp2_tensor2"]
    sizes = bench_scaling.SMOKE["dit"]
    given = ["data=4", "fsdp=2,tensor=2", "data=2,tensor=2"], ["default"], "float32", 5
    cases = bench_scaling.cases_of(sizes, *given)
    names = ["one", "whole in 4", "whole in 2", "data=4 default", "data=2,tensor=2 default"]
    assert [case.name for case in cases] == names
    assert [case.whole for case in cases[3:]] == names[1:3]
    too_large = bench_scaling.cases_of(sizes._replace(alone=2), *given)
    assert [case.name for case in too_large] == [names[0], *names[3:]]


@pytest.mark.parametrize("setting", ["model.layer=2", "batch=none", "batch"])
def test_a_wrong_setting(setting):
    with pytest.raises(typer.BadParameter, match=setting.partition("=")[0]):
        bench_scaling.changed(bench_scaling.SMOKE["lm"], [setting])


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
