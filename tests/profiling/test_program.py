"""`python -m jaxops.profiling`, of programs that know nothing of it."""

import sys
import types

import jax
import pytest
from typer.testing import CliRunner

from jaxops._lib.python_program import ProgramError, run_program
from jaxops.profiling import Report, __main__
from jaxops.profiling.program import profile_program

PROGRAM = """
import functools, sys
import jax, jax.numpy as jnp

@jax.jit
def init():
    return jnp.ones((256, 256))

@functools.partial(jax.jit, donate_argnums=0)
def train_step(w):
    return jnp.tanh(w @ w) / scale(w)

@jax.jit
def scale(w):
    return 1 + jnp.max(w)

class Model:
    @functools.partial(jax.jit, static_argnums=0)
    def look(self, w):
        return w[0, 0]

w, model = init(), Model()
for i in range(int(sys.argv[1])):
    w = train_step(w)
    model.look(w)
print("the program's end", float(w[0, 0]))
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


@pytest.mark.parametrize(("clock", "step"), [((0, 3, 10, 11), "train_step"), ((0, 1, 10, 13), "look")])
def test_the_slowest_of_the_first_functions_is_the_step(clock, step, program, capsys, monkeypatch):
    """By a clock that is read before and after the second call of each, in the program's order."""
    monkeypatch.setattr("jaxops.profiling.program.time", types.SimpleNamespace(perf_counter=iter(clock).__next__))
    lines, jit = [], jax.jit
    report = profile_program(["python", program, "14"], steps=2, say=lines.append)
    assert jax.jit is jit
    assert report.program == f"jit_{step}"
    calls = {"init": 1, "train_step": 14, "look": 14}
    assert lines == [f"profiled '{step}'; jitted functions and their calls: {calls}"]
    assert "the program's end" in capsys.readouterr().out


def test_a_function_by_name_and_a_failing_program(program):
    lines = []
    report = profile_program([program, "14", "3"], function="look", steps=1, say=lines.append)
    assert report.program == "jit_look"
    assert lines[0] == "The program ended with status 3."


def test_the_program_may_end_early(program, capsys):
    assert profile_program([program, "100000"], steps=1, stop=True, say=lambda line: None).kernels
    assert "the program's end" not in capsys.readouterr().out


def test_too_few_calls(program):
    with pytest.raises(ProgramError, match=r"needs 11 calls of one\. Called were: init 1 times, train_step 3 times"):
        profile_program([program, "3"])
    with pytest.raises(ProgramError, match=r"needs 9 calls of one called 'nobody'"):
        profile_program([program, "3"], function="nobody")
    with pytest.raises(ProgramError, match="is no Python program"):
        profile_program(["ls"])


def test_a_file_may_be_called_like_python(tmp_path, capsys):
    file = tmp_path / "python_[step].py"
    file.write_text("import sys; print(sys.argv[1:])", "utf-8")
    for words in ([], ["python"], ["/usr/bin/python3.12"]):
        run_program([*words, str(file), "*", "{}"])
        assert capsys.readouterr().out == "['*', '{}']\n"


def invoke(*words):
    return CliRunner().invoke(__main__.app, words)


def test_the_commands(program, tmp_path):
    out = tmp_path / "out"
    ran = invoke("run", "--steps", "1", "--out", str(out), "--", "python", program, "12")
    assert ran.exit_code == 0, ran.output
    assert "jit_train_step on" in ran.output
    file = out / "profile.json"
    assert f"wrote {file}" in ran.output
    same = invoke("compare", str(file), str(file), "--fail-above", "5%")
    assert same.exit_code == 0, same.output
    slower = tmp_path / "slower.json"
    report = Report.load(file)
    slower.write_text(report.to_json().replace(f'"step_us": {report.step_us}', f'"step_us": {1.1 * report.step_us}'))
    failed = invoke("compare", str(file), str(slower), "--fail-above", "5%")
    assert failed.exit_code == 1
    assert "the step is 10.0% slower, more than 5.0%" in failed.output
    assert invoke("compare", str(file), str(slower), "--fail-above", "20%").exit_code == 0
    assert invoke("compare", str(file), str(slower)).exit_code == 0
    assert "write a percentage" in invoke("compare", str(file), str(slower), "--fail-above", "much").output
    missing = invoke("compare", str(file), str(tmp_path / "missing.json"))
    assert missing.exit_code == 2
    assert "Error: " in missing.output


def test_words_behind_dashes_are_a_program(monkeypatch):
    seen = []
    monkeypatch.setattr(__main__, "app", lambda: seen.append(sys.argv[1:]))
    for words in (["--", "python", "a.py"], ["--steps", "2", "--", "a.py"], ["run", "--", "a.py"], ["ceilings"]):
        monkeypatch.setattr(sys, "argv", ["profiling", *words])
        __main__.main()
    assert seen == [
        ["run", "--", "python", "a.py"], ["run", "--steps", "2", "--", "a.py"], ["run", "--", "a.py"], ["ceilings"],
    ]  # fmt: skip
