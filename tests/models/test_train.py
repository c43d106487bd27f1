"""The training command: which models it knows, and what it says of them."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from models.train import app

ROOT = Path(__file__).parents[2]


def test_without_its_packages_it_names_the_extra():
    without = (
        "import runpy, sys; sys.modules['tensorboardX'] = None; runpy.run_module('models.train', run_name='__main__')"
    )
    failed = subprocess.run([sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "tensorboardX" in failed.stderr
    assert "pip install '.[models]'" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_without_a_command_it_shows_help():
    text = CliRunner().invoke(app, []).output
    assert "Usage:" in text
    for command in ("lm", "dit", "mm"):
        assert f" {command} " in text


def test_the_command_that_generates(monkeypatch, capsys):
    """`python -m models.generate --help`."""
    monkeypatch.setattr(sys, "argv", ["generate", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("models.generate", run_name="__main__")
    assert ended.value.code == 0
    assert "--prompts" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", ["dit --data cats", "lm --preset huge", "dit --steps 0", "lm --precision fp4", "lm --data digits", "vae"]
)
def test_a_bad_option_ends_the_command(words):
    assert CliRunner().invoke(app, words.split()).exit_code == 2
