"""Which process writes, and the error if no process knows the others. test_launch.py trains with two."""

import jax
import pytest
import typer

from models.distributed import initialize, is_first, make_console


def test_one_process(capsys):
    assert is_first()
    make_console().print("seen")
    assert capsys.readouterr().out == "seen\n"


def test_nobody_says_who_takes_part(monkeypatch):
    def refuse(*_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)  # itself it only works before anything else
    with pytest.raises(
        typer.BadParameter, match=r"coordinator_address should be defined.*write --coordinator HOST:PORT"
    ):
        initialize()
