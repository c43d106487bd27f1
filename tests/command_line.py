"""A command, called as from the command line."""

from collections.abc import Callable

import typer
from click.testing import Result
from typer.testing import CliRunner


def run(command: Callable[..., None], *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))
