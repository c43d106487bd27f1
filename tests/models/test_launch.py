"""A stopped training resumes to the same bits, on other devices, and after two processes were killed in a write."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import typer
from jax.sharding import SingleDeviceSharding

from models.distributed import device_memory
from models.distributed.processes import initialize
from models.training import launch, loop
from models.training import lm as train_lm
from models.training.compiling import Compiling
from tests.compilations import compilations
from tests.models.commands import rows_of
from tests.models.interrupted_run import EVERY, train

pytestmark = pytest.mark.usefixtures("tiny")
ROOT = Path(__file__).parents[2]


def lines_of(out: Path) -> list[dict]:
    return [
        {key: value for key, value in row.items() if key not in ("tokens_per_s", "compile_s")} for row in rows_of(out)
    ]


def state_of(out: Path, step: int) -> dict[str, jax.Array]:
    """On one device, from any number."""
    folder, here = out.resolve() / "checkpoints" / str(step), SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as reader:
        saved = reader.metadata(folder).item_metadata.tree
        return reader.restore(
            folder, {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for name, x in saved.items()}
        )


def test_a_run_goes_on_to_the_same_bits(whole, tmp_path, monkeypatch):
    """And with the programs of the run before. One that has ended starts none."""
    started, start = [], Compiling.start
    record = lambda self, name, *given: (started.append(name), start(self, name, *given))
    monkeypatch.setattr(Compiling, "start", record)
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    train(out, save_every=EVERY, resume=True)
    assert started == []
    for step in ("4", "5"):
        shutil.rmtree(out / "checkpoints" / step)
    shutil.rmtree(out / "checkpoint-hf")
    with compilations() as compiled:
        train(out, save_every=EVERY, resume=True)
    assert started == ["step", "evaluate"]
    assert compiled["step"] == compiled["evaluate"] == 0
    assert lines_of(out) == lines_of(whole)
    jax.tree.map(np.testing.assert_array_equal, state_of(out, 5), state_of(whole, 5))
    assert (out / "checkpoint-hf" / "model.safetensors").read_bytes() == (
        whole / "checkpoint-hf" / "model.safetensors"
    ).read_bytes()


def test_a_run_that_has_ended_and_is_not_the_first_process_writes_nothing(whole, tmp_path, monkeypatch):
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    shutil.rmtree(out / "checkpoint-hf")
    for module in (launch, loop, train_lm):
        monkeypatch.setattr(module, "is_first", lambda: False)
    contents = lambda: {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    before = contents()
    train(out, save_every=EVERY, resume=True)
    assert contents() == before


def slurm() -> tuple[int, dict[str, str]]:
    """A free port, and the variables of the second of two tasks, from which JAX derives the same port."""
    for job in range(4096):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", 61440 + job))
            tasks = {"SLURM_JOB_ID": job, "SLURM_NTASKS": 2, "SLURM_PROCID": 1, "SLURM_LOCALID": 0}
            variables = {name: str(value) for name, value in tasks.items()}
            return 61440 + job, variables | {"SLURM_STEP_NODELIST": "localhost,other[01-02]"}
    raise OSError("no port is free")


def test_two_processes_are_killed_and_four_devices_go_on(whole, tmp_path):
    """Their second checkpoint is half written; the first was written while later steps overwrote the state.

    The saved state is that of a run on one device, and so is what four devices with `tensor` and then one make of it.
    One process gets its options, the other SLURM's variables.
    """
    port, variables = slurm()
    command = [sys.executable, "-m", "tests.models.interrupted_run", str(tmp_path)]
    start = lambda more, environment: subprocess.Popen(
        [*command, *more], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    )
    with start([f"localhost:{port}"], {}) as first, start([], variables) as second:
        assert first.stdout is not None
        assert second.stdout is not None
        writing = any(line == "writing\n" for line in first.stdout)
        for process in (first, second):
            process.send_signal(signal.SIGKILL)
        printed = [
            line for line in second.stdout if not line.startswith("[Gloo]")
        ]  # XLA's collectives say who has connected
    assert writing
    assert printed == []
    assert [process.returncode for process in (first, second)] == 2 * [-signal.SIGKILL]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "4.orbax-checkpoint-tmp"}
    assert any((tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp").rglob("*.ocdbt")), "the write had begun"
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6),
        state_of(tmp_path, 2),
        state_of(whole, 2),
    )

    for mesh in ("data=2,tensor=2", None):
        train(tmp_path, save_every=EVERY, resume=True, mesh=mesh)
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "4", "5"]
        for got, want in zip(lines_of(tmp_path), lines_of(whole), strict=True):
            assert got == pytest.approx(want, rel=1e-3)
        jax.tree.map(
            lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4),
            state_of(tmp_path, 5),
            state_of(whole, 5),
        )
        shutil.rmtree(tmp_path / "checkpoints" / "5")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"save_every": 2}, r"has checkpoints up to step 5: write --resume to go on from there"),
        ({}, r"has checkpoints up to step 5"),
        ({"resume": True}, "add --save-every N"),
        (
            {"resume": True, "save_every": 2, "set": ["learning_rate=1.0", "model.width=32"]},
            r"learning_rate is 0\.01 there and 1\.0 here; model\.width is 16 t",
        ),
        ({"mesh": "data=4", "set": ["accumulate=4"]}, "a batch of 2 cannot be split evenly over the 4 devices"),
        ({"mesh": "tensor=4"}, "tensor=4 does not divide heads, 2: attention is split by heads. Write a number that"),
        ({"mesh": "data=2,tensor=2", "set": ["context=15", "batch=4"]}, "has 15 rows, which tensor=2 does not divide"),
        ({"mesh": "data=3"}, "is for 3 devices, and there are 4"),
        ({"mesh": "data=4", "backend": "pallas"}, "over a mesh Pallas' kernels need GPUs"),
    ],
)
def test_what_does_not_go_together(options, says, whole):
    before = (whole / "config.yaml").read_text()
    with pytest.raises(typer.BadParameter, match=says):
        train(whole, **options)
    assert (whole / "config.yaml").read_text() == before


def test_other_data(whole, tmp_path):
    """A run resumes with its original data, or names the differences."""
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    sums = json.loads((out / "data.json").read_text())
    (name,) = sums
    for changed, says in (
        ({name: 1}, f"{name} has changed"),
        ({}, f"{name} is new"),
        ({**sums, "gone.txt": 7}, "gone.txt is missing"),
    ):
        (out / "data.json").write_text(json.dumps(changed))
        with pytest.raises(typer.BadParameter, match=f"not what the run began with: {re.escape(says)}.*or remove"):
            train(out, save_every=EVERY, resume=True)
    (out / "data.json").write_text("{")
    with pytest.raises(typer.BadParameter, match=r"data\.json is not JSON"):
        train(out, save_every=EVERY, resume=True)


@pytest.mark.parametrize(
    "damage",
    [lambda text: text.replace("0.01", "0.02"), lambda text: text[:100], lambda text: ""],
    ids=["changed", "cut", "empty"],
)
def test_a_damaged_config(damage, whole, tmp_path):
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    text = (out / "config.yaml").read_text()
    assert damage(text) != text
    (out / "config.yaml").write_text(damage(text))
    with pytest.raises(typer.BadParameter, match=r"config\.yaml is not as the run wrote it"):
        train(out, save_every=EVERY, resume=True)


def test_several_processes_need_a_mesh(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(typer.BadParameter, match="2 processes train together on a mesh: write data=4"):
        train(tmp_path)
    monkeypatch.setattr("models.training.launch.initialize", lambda *given: pytest.fail(str(given)))
    with pytest.raises(pytest.fail.Exception, match=r"\('host:1', 2, 0\)"):
        train(tmp_path, coordinator="host:1", processes=2, process_id=0)


def test_temporaries_may_have_any_free_memory(monkeypatch):
    """XLA would end the two processes above for an option that it does not know."""
    partitioned = ["--xla_gpu_enable_allocator_spatial_partitioning=false"] if jax.__version_info__ >= (0, 11) else []
    for flags in ("", "--xla_cpu_max_isa=AVX2"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        device_memory.disable_partitioning()
        device_memory.disable_partitioning()
        assert os.environ["XLA_FLAGS"].split() == flags.split() + partitioned


def test_nobody_says_who_takes_part(monkeypatch):
    def refuse(*_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)  # itself it only works before anything else
    with pytest.raises(
        typer.BadParameter, match=r"coordinator_address should be defined.*write --coordinator HOST:PORT"
    ):
        initialize()


def test_gpus_of_a_slurm_task():
    """Of a job's only task, which JAX connects to itself; SLURM_STEP_NUM_NODES is 2 where it stands for other tasks."""
    cases = [
        ({"SLURM_STEP_NUM_NODES": "1"}, "all"),  # srun --ntasks-per-node=1
        ({"SLURM_LOCALID": "3", "SLURM_STEP_NUM_NODES": "2"}, "3"),  # a process a GPU
        ({"SLURM_LOCALID": "3", "SLURM_STEP_NUM_NODES": "2", "CUDA_VISIBLE_DEVICES": "3"}, "all"),  # --gpus-per-task=1
        ({"SLURM_STEP_NUM_NODES": "1", "JAX_LOCAL_DEVICE_IDS": "0,1"}, "0,1"),
    ]
    _, slurms = slurm()
    alone = slurms | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    code = """if True:
        import json, os, sys, jax
        from models.distributed.processes import initialize
        before = dict(os.environ)
        for variables in json.loads(sys.argv[1]):
            os.environ.update(variables)
            initialize()
            print(jax.config.values["jax_cuda_visible_devices"])
            jax.distributed.shutdown()
            os.environ.clear()
            os.environ.update(before)
    """
    command = [sys.executable, "-c", code, json.dumps([alone | variables for variables, _ in cases])]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert told.stdout.split() == [gpus for _, gpus in cases], told.stderr
