"""What is printed is what was given, in any encoding, also after the reader has gone."""

import ast
import io
import os
import pathlib
import sys

import pytest
import typer
from typer.testing import CliRunner

from models.train import app
from models.training import config
from models.training.loop import Run
from models.training.terminal import Terminal, lines

ROOT = pathlib.Path(__file__).parents[2]
LITERAL = ("[red]", "[bold]x[/bold]", "[link=x]", ":smile:", "{}", "%(a)s", "C:\\new\\table", "\\[", "$a_b$")
ESCAPED = {"a\nb": "a\\nb", "a\rb": "a\\rb", "\x1b[31m": "\\x1b[31m", "\u2028": "\\u2028", "\udcff": "\\udcff"}


@pytest.mark.parametrize(("given", "shown"), [*((text, text) for text in LITERAL), *ESCAPED.items()])
def test_names_are_shown_as_they_are(given, shown):
    """By a run, and in the errors of a command, in one line each."""
    text = io.StringIO()
    Run(pathlib.Path(given), Terminal(file=text)).say(f"{given} is {given}")
    assert text.getvalue() == f"{shown} is {shown}\n"

    def refuse(_: config.Options) -> None:
        raise typer.BadParameter(f"{given} is {given}")

    with pytest.raises(typer.BadParameter) as caught:
        config.command(config.Options, refuse)()
    assert caught.value.message == f"{shown} is {shown}"


def test_a_text_keeps_its_lines():
    assert lines("a\tb\n\x1b[31m\r\n\n") == "a\tb\n\\x1b[31m\\r\n\n"


def test_an_error_is_a_line():
    """However long its names are."""
    name = "long name " * 20
    done = CliRunner().invoke(app, ["dit", "--preset", name])
    assert done.exit_code == 2
    assert f"'{name}' is not one of demo, small, 1b." in done.output.splitlines()[-1]


def test_what_the_encoding_does_not_have(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    shown = []

    def show(_: config.Options) -> None:
        Terminal().print("caf\xe9 \u65e5", end=" ")
        print("\udcff")
        shown.append(True)

    config.command(config.Options, show)()
    assert shown
    assert written.getvalue() == b"caf? ? ?\n"


def test_a_reader_that_has_gone():
    """As of `| head`: nothing more is written, and nothing raises, also when the file is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        terminal = Terminal(file=file)
        for _ in range(3):
            terminal.print("a line")
        file.write("another")


def test_nothing_prints_markup():
    """rich's Console would read what a user gives as markup."""
    found = set()
    for folder in ("jaxops", "models", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
                    *("Console", "from_markup", "get_console", "print_json", "secho"),
                ):
                    found.add(str(file.relative_to(ROOT)))
    assert not found
