"""The problems of a program, one tuning session over them, the card's state, and the stored rows as files."""

import json
import os
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import jaxops
import jaxops.tuning
from jaxops._lib.device import Device
from jaxops._lib.tuned import read_rows, tuned_rows, user_file
from jaxops.ops import adaln, fp8_matmul, grouped_matmul
from jaxops.tuning import TuningError, program, record, use_rows
from jaxops.tuning import __main__ as command_line
from jaxops.tuning.card import check_card
from jaxops.tuning.ops import OPS

CARD = Device("NVIDIA Test", "gpu")
LARGE = grouped_matmul.Problem(2, 32, 16, 24, "float32")
SMALL = adaln.Problem(4, 8, 1, "float32")
PROGRAM = """
import jax, jax.numpy as jnp, jaxops, sys
ones = jnp.ones
jax.jit(jaxops.adaln)(ones((4, 8)), ones((1, 8)), ones((1, 8)))
for _ in range(2):
    jaxops.grouped_matmul(ones((32, 16)), ones((2, 16, 24)), jnp.array([0, 20, 32]))
jaxops.permute
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def _own_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read_rows.cache_clear()
    yield
    read_rows.cache_clear()


@pytest.fixture
def script(tmp_path) -> pathlib.Path:
    file = tmp_path / "a_program.py"
    file.write_text(PROGRAM)
    return file


def norm() -> jax.Array:
    return jaxops.adaln(jnp.ones((4, 8)), jnp.ones((1, 8)), jnp.ones((1, 8)))


def test_record_sees_functions_that_are_compiled_already():
    step = jax.jit(norm)
    step()
    with record() as first:
        step()
        step()  # compiled: counts no more
    with record() as outer:
        with record() as inner:
            step()
        assert not outer
    norm()
    assert first == inner == {SMALL: 1}


def test_record_sees_the_ops_inside_of_ops():
    with record() as problems:
        arrays = jnp.ones((8, 16)), jnp.ones((2, 16, 8)), jnp.ones((2, 16, 8)), jnp.array([0, 3, 8])
        jax.eval_shape(jaxops.grouped_glu, *arrays)
    assert grouped_matmul.Problem(2, 8, 16, 8, "float32") in problems


def test_a_program_in_this_process(script, tmp_path, monkeypatch):
    """By file and by module; also of one that fails; its arguments are its own."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before, out = sys.argv, tmp_path / "problems"
    for words in (["python3.13", str(script), "0"], [str(script), "3"], ["python", "-m", "a_program", "0"]):
        out.unlink(missing_ok=True)
        with pytest.raises(SystemExit):
            program.run_recorded(words, out)
        found = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(line["op"], line["traced"]) for line in found] == [("adaln", 1), ("grouped_matmul", 2)]
        assert OPS["grouped_matmul"].problem(**found[1]["problem"]) == LARGE
        assert sys.argv is before


@pytest.mark.parametrize("words", [[], ["python"], ["-m"], ["make", "demo"], ["python", "-c", "pass"]])
def test_what_is_no_program(words, tmp_path):
    with pytest.raises(program.ProgramError, match=r"write 'python -m MODULE \.\.\.' or 'python FILE\.py"):
        program.run_recorded(words, tmp_path / "problems")


def test_a_program_in_its_own_process(script, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    root = str(pathlib.Path(jaxops.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    assert program.problems_of(["python", str(script), "1"]) == [(LARGE, 2), (SMALL, 1)]  # it fails after its plans
    script.write_text("raise SystemExit(2)")
    with pytest.raises(program.ProgramError, match="ended with status 2 before it made a plan"):
        program.problems_of(["python", str(script)])


@pytest.fixture
def measured(monkeypatch) -> list:
    """The calls of `tune`, which takes the heuristic's tiles."""
    calls = []

    def tune(problem, passes, **_):
        calls.append((problem, passes))
        planner = jaxops.tuning.op_of(problem)[1].planner
        tiles = {name: planner.heuristic(name, problem, CARD, "pallas") for name in passes}
        return [{"pass": name, **vars(problem), "tiles": vars(tiles[name]), "us": 1.0} for name in passes]

    monkeypatch.setattr(jaxops.tuning, "tune", tune)
    monkeypatch.setattr(jaxops.tuning, "current_device", lambda: CARD)
    return calls


def test_a_session_goes_on_where_it_was_stopped(measured):
    stops = iter([None, TuningError("the card is shared")])

    def check():
        if error := next(stops):
            raise error

    with pytest.raises(TuningError, match="shared"):
        program.tune_all([LARGE, SMALL], check=check)
    assert measured == [(LARGE, ["fwd", "dgrad", "wgrad"])]
    assert len(tuned_rows("grouped_matmul", CARD)) == 3
    same_bucket = grouped_matmul.Problem(2, 30, 16, 24, "float32")
    started = []
    rows = program.tune_all([LARGE, same_bucket, SMALL], start=lambda *what: started.append(what))
    assert measured[1:] == [(SMALL, ["fwd", "bwd"])]
    assert [what for what, _ in started] == [f"adaln {SMALL}"]
    assert started[0][1] == sum(len(OPS["adaln"].planner.candidates(name, SMALL, CARD)) for name in ("fwd", "bwd"))
    assert [row["pass"] for row in rows] == ["fwd", "bwd"]
    assert program.tune_all([LARGE, SMALL]) == []


def test_a_session_measures_again_and_stores_nothing_if_dry(measured):
    program.tune_all([SMALL], dry_run=True)
    assert not user_file("adaln", CARD).exists()
    program.tune_all([SMALL], passes=["bwd"])
    program.tune_all([SMALL])
    program.tune_all([SMALL], again=True)
    assert [passes for _, passes in measured] == [["fwd", "bwd"], ["bwd"], ["fwd"], ["fwd", "bwd"]]


def test_a_session_leaves_out_what_cannot_be_tuned(measured, monkeypatch, capsys):
    """And what runs no kernel."""
    tune, empty = jaxops.tuning.tune, grouped_matmul.Problem(2, 0, 16, 24, "float32")

    def too_large(problem, passes, **how):
        if problem == LARGE:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return tune(problem, passes, **how)

    monkeypatch.setattr(jaxops.tuning, "tune", too_large)
    with pytest.raises(TuningError, match="1 problems could not be tuned"):
        program.tune_all([empty, LARGE, SMALL])
    assert "left out: RESOURCE_EXHAUSTED" in capsys.readouterr().out
    assert [problem for problem, _ in measured] == [SMALL]
    assert tuned_rows("adaln", CARD)
    dense = fp8_matmul.Problem(8, 16, 16, "rowwise", "float32")
    program.tune_all([dense], passes=["fwd"])
    assert measured[-1] == (dense, ["fwd"])


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(command_line.app, list(words), env={"COLUMNS": "300"})
    return result.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", result.output)


def test_the_rows_as_files(measured, tmp_path):
    assert run("list") == (0, f"No rows in {tmp_path}/jaxops/tuned.\n")
    assert run("clear") == (0, f"No rows in {tmp_path}/jaxops/tuned.\n")
    program.tune_all([LARGE, SMALL])
    code, text = run("list", "adaln")
    assert code == 0
    assert text.count("T=4, D=8, B=1, dtype=float32, gated=False, fp8=False") == 2
    assert "G=2" not in text
    folder = tmp_path / "shared"
    assert run("export", str(folder))[0] == 0
    assert {str(file.relative_to(folder)) for file in folder.rglob("*.jsonl")} == {
        "adaln/nvidia_test.jsonl",
        "grouped_matmul/nvidia_test.jsonl",
    }
    code, text = run("export", str(folder), "adaln")
    assert code == 1
    assert text.startswith("Error: ")
    assert "adaln/nvidia_test.jsonl exists: name another folder." in text
    assert run("clear", "adaln", "--yes")[0] == 0
    assert not user_file("adaln", CARD).exists()
    assert user_file("grouped_matmul", CARD).exists()
    assert run("clear")[0] == 1  # asked, and not answered
    assert user_file("grouped_matmul", CARD).exists()
    with use_rows(folder):
        assert len(tuned_rows("adaln", CARD)) == 2
    assert run("list", "relu")[0] == 2


def test_the_command_on_a_program(measured, monkeypatch):
    monkeypatch.setattr(command_line, "problems_of", lambda words: [(LARGE, 2), (SMALL, 1)])
    monkeypatch.setattr(command_line, "check_card", lambda: None)
    code, text = run("--from-step", "python -m a_program 0")
    assert code == 0
    assert "fwd, dgrad, wgrad" in text
    assert [problem for problem, _ in measured] == [LARGE, SMALL]
    assert all(f"stored in {user_file(name, CARD)}" in text for name in ("grouped_matmul", "adaln"))
    code, text = run("--from-step", "python -m a_program 0")
    assert code == 0
    assert "nothing to tune" in text
    assert len(measured) == 2
    code, text = run()
    assert code == 2
    assert "--from-step" in text


def test_the_command_on_a_program_on_a_cpu(monkeypatch):
    monkeypatch.setattr(command_line, "problems_of", lambda words: [(SMALL, 1)])
    with jax.default_device(jax.devices("cpu")[0]):
        code, text = run("--from-step", "python -m a_program 0")
    assert code == 1
    assert "fwd, bwd" in text
    assert text.endswith("Error: tuning measures GPU kernels, but the default device is cpu.\n")


@pytest.mark.parametrize(
    ("processes", "states", "visible", "error"),
    [
        (1, "Not Active, Not Active, Not Active, Not Active", "", None),
        (0, "Not Active, Not Active, Not Active, Not Active", "GPU-5", None),
        (2, "Not Active, Not Active, Not Active, Not Active", "", "2 processes run on GPU 0"),
        (1, "Not Active, Active, Not Active, Not Active", "GPU-5,GPU-6", r"GPU GPU-5 .*\(hw_thermal_slowdown\)"),
        (1, "[N/A], [N/A], [N/A], [N/A]", "", None),
    ],
)
def test_the_card(tmp_path, monkeypatch, processes, states, visible, error):
    smi = tmp_path / "nvidia-smi"
    pids = "\n".join(str(1000 + i) for i in range(processes))
    smi.write_text(f'#!/bin/sh\ncase "$*" in *compute-apps*) printf "{pids}";; *) echo "{states}";; esac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    if error is None:
        check_card()
    else:
        with pytest.raises(TuningError, match=error):
            check_card()


def test_a_card_without_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    check_card()
    (tmp_path / "nvidia-smi").write_text("#!/bin/false\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    check_card()
