"""Runs that end early: by a signal, which saves first, and by a full disk. Each says in one line what is kept."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from models.training import ending, loop
from models.training.report import MetricsLog
from tests.models.interrupted_run import EVERY, train, watched_steps

pytestmark = pytest.mark.usefixtures("tiny")
ROOT = Path(__file__).parents[2]


def at_step(monkeypatch, chosen: int, do) -> None:
    """Calls a function before a step of the run."""
    wrap = lambda step, number: (do() if number == chosen else None, step())[1]
    monkeypatch.setattr(loop, "make_step", watched_steps(loop.make_step, wrap))


def stopped_by(number: signal.Signals, step: int, out: Path, capsys, **options) -> str:
    """The last line of a run that a signal stops before a step."""
    before = [signal.getsignal(which) for which in ending.SIGNALS]
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, lambda: os.kill(os.getpid(), number))
        patch.setattr(sys, "argv", ["train", "lm", "--out", "a folder"])
        with pytest.raises(typer.Exit) as caught:
            train(out, **options)
    assert caught.value.exit_code == 128 + number
    assert [signal.getsignal(which) for which in ending.SIGNALS] == before
    return capsys.readouterr().out.splitlines()[-1]


def test_a_signal_saves_first_and_the_run_goes_on_to_the_same_bits(whole, tmp_path, capsys):
    assert stopped_by(signal.SIGTERM, 3, tmp_path, capsys, save_every=EVERY) == (
        "Stopped by SIGTERM. The checkpoint of step 3 is kept; go on with: "
        "python -m models.train lm --out 'a folder' --resume"
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
    train(tmp_path, save_every=EVERY, resume=True)
    model = lambda out: (out / "checkpoint-hf" / "model.safetensors").read_bytes()
    assert model(tmp_path) == model(whole)


def test_without_checkpoints_nothing_is_saved(tmp_path, capsys):
    line = stopped_by(signal.SIGINT, 2, tmp_path, capsys)
    assert line == "Stopped by SIGINT. Nothing was saved: with --save-every N a run writes checkpoints."


def test_a_second_signal_ends_the_process():
    code = """
import os, signal, threading
from models.training.ending import stop_signals
with stop_signals() as asked:
    os.kill(os.getpid(), signal.SIGINT)
    assert asked(1) == signal.SIGINT
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert ended.returncode == -signal.SIGTERM


def test_a_full_disk(tmp_path, monkeypatch, capsys):
    """From step 4 on the log is on a full disk."""
    add = MetricsLog.add

    def add_to_full(log, done, *given):
        if done == 4:
            log._lines.close()
            log._lines = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - the log closes it
        add(log, done, *given)

    monkeypatch.setattr(MetricsLog, "add", add_to_full)
    with pytest.raises(typer.Exit) as caught:
        train(tmp_path, save_every=EVERY)
    assert caught.value.exit_code == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("No space is left on the disk: free some. The checkpoint of step 2 is kept; go on with: ")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]


def test_what_is_a_full_disk():
    """By its number, by TensorStore's words, or as the cause of another error."""
    chained = RuntimeError("of a writer")
    chained.__cause__ = OSError(errno.EDQUOT, "x")
    words = ValueError("RESOURCE_EXHAUSTED: Failed writing: [OS error 28: No space left on device]")
    assert all(map(ending.is_full, (OSError(errno.ENOSPC, "x"), words, chained)))
    assert not ending.is_full(OSError(errno.ENOENT, "x"))


def test_other_errors_keep_their_traceback(tmp_path, monkeypatch):
    def fail():
        raise ZeroDivisionError("a bug")

    at_step(monkeypatch, 2, fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        train(tmp_path)
