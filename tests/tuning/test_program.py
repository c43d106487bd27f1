"""The problems of a program, one tuning session over them, and the stored rows as files."""

import os
import pathlib
import re
import subprocess

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import jaxops
import jaxops.tuning
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.tuned import tuned_rows, user_file
from jaxops.described import tunings
from jaxops.ops import adaln, fp8_matmul, grouped_matmul, quantize
from jaxops.tuning import TuningError, program, record, use_rows
from jaxops.tuning import __main__ as command_line

CARD = Device("NVIDIA Test", "gpu")
LARGE = grouped_matmul.Problem(2, 32, 16, 24, "float32")
SMALL = adaln.Problem(4, 8, 1, "float32")
PROGRAM = """
import jax, jax.export, jax.numpy as jnp, jaxops, sys
ones = jnp.ones
jax.jit(jaxops.adaln)(ones((4, 8)), ones((1, 8)), ones((1, 8)))
for _ in range(2):
    jaxops.grouped_matmul(ones((32, 16)), ones((2, 16, 24)), jnp.array([0, 20, 32]))
T, = jax.export.symbolic_shape("T")
shapes = [jax.ShapeDtypeStruct(*x) for x in (((T, 16), "float32"), ((2, 16, 24), "float32"), ((3,), "int32"))]
jax.export.export(jax.jit(lambda *given: jaxops.grouped_matmul(*given, backend="xla")))(*shapes)
assert sys.argv[2:] in ([], ["--", "--help"])
sys.exit(int(sys.argv[1]))
"""


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


@pytest.mark.parametrize("words", [[], ["python"], ["-m"], ["make", "demo"], ["python", "-c", "pass"]])
def test_what_is_no_program(words, tmp_path):
    with pytest.raises(program.ProgramError, match=r"write 'python -m MODULE \.\.\.' or 'python FILE\.py"):
        program.run_recorded(words, tmp_path / "problems")


def test_a_program_in_its_own_process(script, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    root = str(pathlib.Path(jaxops.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, str(script.parent), os.environ.get("PYTHONPATH", "")]))
    said = []
    words = ["python3.13", "-m", "a_program", "1", "--", "--help"]  # the program's, every one behind its name
    assert program.problems_of(words, said.append) == [(LARGE, 2), (SMALL, 1)]
    assert said == ["The program ended with status 1; these are the problems until then."]
    monkeypatch.setattr("subprocess.run", lambda command, **_: subprocess.CompletedProcess(command, 2))
    with pytest.raises(program.ProgramError, match="ended with status 2 and made no plan of adaln, "):
        program.problems_of(["python", str(script)])


@pytest.fixture
def measured(monkeypatch) -> list:
    """The calls of `tune`, which takes the heuristic's tiles."""
    calls = []

    def tune(problem, passes, **_):
        calls.append((problem, passes))
        planner = jaxops.tuning.op_of(problem)[1].planner
        tiles = {name: planner.heuristic(name, problem, CARD, "pallas") for name in passes}
        op, _ = jaxops.tuning.op_of(problem)
        return [{"op": op, "pass": name, **vars(problem), "tiles": vars(tiles[name]), "us": 1.0} for name in passes]

    monkeypatch.setattr(jaxops.tuning, "tune", tune)
    monkeypatch.setattr(jaxops.tuning, "current_device", lambda: CARD)
    return calls


def test_a_session_goes_on_where_it_was_stopped(measured):
    stops = iter([None, None, TuningError("the card is shared")])

    def check():
        if error := next(stops):
            raise error

    with pytest.raises(TuningError, match="shared"):
        program.tune_all([LARGE, SMALL], check=check)
    assert measured == [(LARGE, ["fwd"]), (LARGE, ["dgrad"])]
    assert len(tuned_rows("grouped_matmul", CARD)) == 2
    same_bucket = grouped_matmul.Problem(2, 30, 16, 24, "float32")
    said = []
    rows = program.tune_all([LARGE, same_bucket, SMALL], say=said.append)
    assert measured[2:] == [(LARGE, ["wgrad"]), (SMALL, ["fwd"]), (SMALL, ["bwd"])]
    count = len(tunings()["adaln"].planner.candidates("fwd", SMALL, CARD))
    assert said[1] == f"adaln {SMALL} fwd, {count} candidates"
    assert [row["pass"] for row in rows] == ["wgrad", "fwd", "bwd"]
    assert program.tune_all([LARGE, SMALL]) == []


def test_a_session_that_cannot_store_measures_nothing(measured, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    code, text = run("adaln", "--shape", "4,8,1", "--force")
    assert (code, text.count("\n")) == (1, 1)
    assert re.match(r"Error: tuned rows of adaln cannot be stored \(.*/dev/null.*: set XDG_CACHE_HOME to the", text)
    assert not measured
    assert run("adaln", "--shape", "4,8,1", "--force", "--dry-run")[0] == 0
    for command in ("list", "clear", "export"):
        assert run(command, *(["out"] if command == "export" else []))[1].count("\n") == 1


def test_a_session_measures_again_and_stores_nothing_if_dry(measured):
    program.tune_all([SMALL], dry_run=True)
    assert not user_file("adaln", CARD).exists()
    program.tune_all([SMALL], passes=["bwd"])
    program.tune_all([SMALL])
    program.tune_all([SMALL], again=True)
    assert [passes for _, passes in measured] == [["fwd"], ["bwd"], ["bwd"], ["fwd"], ["fwd"], ["bwd"]]


def test_a_session_leaves_out_what_cannot_be_tuned(measured, monkeypatch, capsys):
    """What does not fit the card, what it cannot run, and what runs no kernel."""
    tune, empty = jaxops.tuning.tune, grouped_matmul.Problem(2, 0, 16, 24, "float32")
    fp8 = quantize.Problem(64, 64, "bfloat16")

    def too_large(problem, passes, **how):
        if problem == LARGE:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return tune(problem, passes, **how)

    monkeypatch.setattr(jaxops.tuning, "tune", too_large)
    monkeypatch.setattr(jaxops.tuning, "current_device", lambda: Device("NVIDIA A100", "gpu", capability=(8, 0)))
    with pytest.raises(TuningError, match="4 passes could not be tuned"):
        program.tune_all([empty, LARGE, fp8, SMALL])
    said = capsys.readouterr().out
    assert said.count("left out: RESOURCE_EXHAUSTED") == 3
    assert "needs an NVIDIA GPU of compute capability 8.9" in said
    assert "a size is 0" in said
    assert measured == [(SMALL, ["fwd"]), (SMALL, ["bwd"])]
    dense = fp8_matmul.Problem(8, 16, 16, "rowwise", "float32")
    monkeypatch.setattr(jaxops.tuning, "current_device", lambda: CARD)
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
    monkeypatch.setattr(command_line, "disturbance", lambda: "")
    code, text = run("--from-step", "python -m a_program 0")
    assert code == 0
    assert "fwd, dgrad, wgrad" in text
    assert [problem for problem, _ in measured] == [LARGE] * 3 + [SMALL] * 2
    assert all(f"stored in {user_file(name, CARD)}" in text for name in ("grouped_matmul", "adaln"))
    code, text = run("--from-step", "python -m a_program 0")
    assert code == 0
    assert "Nothing to tune; --again" in text
    assert len(measured) == 5
    assert run("--again", "--dry-run", "--from-step", "python -m a_program 0")[0] == 0
    assert len(measured) == 10
    assert len(tuned_rows("adaln", CARD)) == 2
    code, text = run()
    assert code == 2
    assert "--from-step" in text


def test_a_command_asks_for_the_card(measured, monkeypatch):
    monkeypatch.setattr(command_line, "disturbance", lambda: "2 processes run on GPU 0")
    error = "Error: 2 processes run on GPU 0: tune on a cool card of your own, or pass --force.\n"
    assert run("adaln", "--shape", "4,8,1", "--dry-run") == (1, error)
    assert run("adaln", "--shape", "4,8,1", "--dry-run", "--force")[0] == 0
    assert not user_file("adaln", CARD).exists()


def test_a_damaged_file(measured):
    program.tune_all([SMALL])
    file = user_file("adaln", CARD)
    file.write_text(file.read_text()[:-20])
    code, text = run("list")
    assert code == 1
    assert f"{file} is damaged" in text.replace("\n", "")
    assert run("clear", "adaln", "--yes")[0] == 0
    assert not file.exists()


def test_rows_name_their_op():
    row = {"pass": "fwd", **vars(SMALL), "tiles": {}}
    with pytest.raises(ValueError, match="each of rows needs the name of its op"):
        adaln.make_plan(SMALL, CARD, [row])


def stored(name: str = "fwd", kernel: str = "pallas", **change) -> dict:
    tiles = vars(grouped_matmul.Tiles(32, 16, 16)) | ({} if kernel == "pallas" else {"kernel": kernel})
    return {"op": "grouped_matmul", "pass": name, **vars(LARGE), "tiles": tiles, **change}


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([], ["fwd", "dgrad", "wgrad"]),
        ([stored()], ["dgrad", "wgrad"]),
        ([stored(), stored("wgrad"), stored("dgrad")], []),
        ([stored(M=17)], ["dgrad", "wgrad"]),  # up to the same power of two
        ([stored(M=16), stored("dgrad", M=33)], ["fwd", "dgrad", "wgrad"]),
        ([stored(K=32), stored(N=8), stored(G=3), stored(dtype="bfloat16")], ["fwd", "dgrad", "wgrad"]),
        ([stored(kernel="triton")], ["fwd", "dgrad", "wgrad"]),
    ],
    ids=["none", "one", "all", "bucket", "lengths", "sizes", "kernel"],
)
def test_untuned_is_what_no_row_of_ones_own_serves(rows, wanted, monkeypatch):
    monkeypatch.setattr(jaxops.tuning, "current_device", lambda: CARD)
    jaxops.tuning.store(rows)
    assert program.untuned(LARGE, CARD) == wanted
    assert program.untuned(LARGE, Device("NVIDIA Other", "gpu")) == ["fwd", "dgrad", "wgrad"]
    monkeypatch.setattr(tunings()["grouped_matmul"], "kernels", lambda *_: ("pallas", "triton"))
    assert program.untuned(LARGE, CARD) == ["fwd", "dgrad", "wgrad"], "each kernel needs its row"


def test_shipped_rows_are_not_ones_own():
    card = Device("NVIDIA H200", "gpu")
    shipped, problem = tuned_rows("quantize", card)[0], tunings()["quantize"].problem
    found = problem(**{name: shipped[name] for name in problem.__dataclass_fields__ if name in shipped})
    assert shipped["pass"] in program.untuned(found, card)
