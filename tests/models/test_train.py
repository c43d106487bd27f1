"""The training command: which models it knows, and what it says of them."""

import re
import runpy
import sys

import pytest
from typer.testing import CliRunner

import models.training
from models.train import app


def test_without_its_packages_it_names_the_extra(monkeypatch):
    """Its modules are imported anew, in this process: another one would first import JAX."""
    monkeypatch.setattr(models, "training", models.training)
    for name in [name for name in sys.modules if re.match(r"models\.train(ing)?\b", name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(SystemExit, match=r"^import of tensorboardX.*more packages.*pip install '\.\[models\]'"):
        runpy.run_module("models.train", run_name="__main__")


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
