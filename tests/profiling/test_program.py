"""`python -m jaxops.profiling`, of programs that know nothing of it."""

import sys

import pytest
from typer.testing import CliRunner

from jaxops._lib.python_program import ProgramError, run_program
from jaxops.profiling import Report, __main__
from jaxops.profiling.program import profile_program, steps_in
from jaxops.profiling.trace import Event, Launch

pytestmark = pytest.mark.versions

PROGRAM = """
import functools, sys, time
import jax, jax.numpy as jnp

@jax.jit
def init():
    return jnp.ones((512, 512))

@functools.partial(jax.jit, donate_argnums=0)
def train_step(w):
    return jnp.tanh(w @ w) / jnp.max(w)

@jax.jit
def look(w):
    return w[0, 0] + 1

w = init()
end = time.time() + float(sys.argv[1])
try:
    while time.time() < end:
        w = train_step(w)
        float(look(w))
except KeyboardInterrupt:
    if len(sys.argv) < 3:
        raise
    sys.exit(int(sys.argv[2]))
print("the program's end", float(w[0, 0]))
sys.exit()
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


def test_the_program_with_most_time_is_the_step_and_the_program_may_be_ended(program, capsys):
    lines = []
    report = profile_program(["python", program, "1000"], steps=2, stop=True, say=lines.append)
    assert (report.program, report.steps, report.accounted) == ("jit_train_step", 2, 1.0)
    assert {each.program: each.calls for each in report.kernels if each.primitive == "dot_general"} == {
        "jit_train_step": pytest.approx(1)
    }
    assert lines[0].startswith("profiled jit_train_step; recorded calls of jitted functions: {")
    assert "'train_step': " in lines[0]
    assert report.memory is not None
    assert report.memory.peak_bytes >= 512 * 512 * 4
    assert "the program's end" not in capsys.readouterr().out


def test_too_few_calls(program):
    with pytest.raises(ProgramError, match=r"no recording has 4 calls of a jitted function called 'nobody'"):
        profile_program([program, "0.1"], function="nobody")
    with pytest.raises(ProgramError, match="is no Python program"):
        profile_program(["ls"])


def events_of(op, program, starts):
    return [Event(op, float(start), 4.0, 0, "Stream #1", program, op) for start in starts]


class TestStepsIn:
    """Of a step of 10 us that runs `scan` three times, and of a smaller program between."""

    EVENTS = (
        *events_of("dot", "jit_step", range(0, 60, 10)),
        *events_of("scan", "jit_step", sorted(start + i for start in range(4, 64, 10) for i in range(3))),
        *events_of("add", "jit_look", range(9, 60, 10)),
    )
    CALLS = tuple(Launch(name, 10.0 * i - 1, False) for i in range(6) for name in ("step", "look"))

    def test_the_last_steps(self):
        recording = steps_in(self.EVENTS, self.CALLS, 2)
        assert recording is not None
        assert (recording.program, recording.step_us, recording.steps) == ("jit_step", 10.0, 2)
        assert sorted((event.op, event.start_us) for event in recording.events if event.op != "scan") == [
            ("add", 39.0), ("add", 49.0), ("dot", 30.0), ("dot", 40.0),
        ]  # fmt: skip
        assert sum(event.op == "scan" for event in recording.events) == 6

    def test_a_function_by_name(self):
        recording = steps_in(self.EVENTS, self.CALLS, 2, "look")
        assert recording is not None
        assert recording.program == "jit_look"

    def test_annotations_count_before_calls(self):
        """A step of two calls: gradients are accumulated."""
        annotations = [Launch("train", 20.0 * i, True) for i in range(3)]
        twice = [*self.EVENTS, *events_of("update", "jit_step", (18, 38, 58))]
        recording = steps_in(twice, [*self.CALLS, *annotations], 2)
        assert recording is not None
        assert recording.step_us == 20.0

    @pytest.mark.parametrize(("steps", "function"), [(6, ""), (2, "nobody")])
    def test_too_few(self, steps, function):
        assert steps_in(self.EVENTS, self.CALLS, steps, function) is None


def test_a_file_may_be_called_like_python(tmp_path, capsys):
    file = tmp_path / "python_[step].py"
    file.write_text("import sys; print(sys.argv[1:])", "utf-8")
    for words in ([], ["python"], ["/usr/bin/python3.12"]):
        run_program([*words, str(file), "*", "{}"])
        assert capsys.readouterr().out == "['*', '{}']\n"


def invoke(*words):
    return CliRunner().invoke(__main__.app, words)


def test_the_commands(program, tmp_path, monkeypatch):
    exits, out = [], tmp_path / "out"
    monkeypatch.setattr("os._exit", exits.append)
    ran = invoke("run", "--stop", "--steps", "1", "--out", str(out), "--", "python", program, "1000", "3")
    assert (ran.exit_code, exits) == (0, [0]), ran.output
    assert "jit_train_step on" in ran.output
    assert "The program ended with status 3." in ran.output
    file = out / "profile.json"
    assert f"wrote {file}" in ran.output
    same = invoke("compare", str(file), str(file), "--fail-above", "5%")
    assert same.exit_code == 0, same.output
    slower = tmp_path / "slower.json"
    report = Report.load(file)
    monkeypatch.setattr(__main__, "profile_program", lambda *_, **__: report)
    assert invoke("run", "--out", str(out), "--", program).exit_code == 0
    assert exits == [0], "without --stop this process goes on"
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
