"""The tools print names as they are."""

import io

from rich.table import Table

from jaxops._lib.terminal import console

NAMES = ("[red]", "[/]", ":smile:", "{}", "%s", "a\\b")


def test_names_are_no_markup():
    text = io.StringIO()
    table = Table("[bold]")
    for name in NAMES:
        table.add_row(name)
    console(file=text, width=40).print(table, *NAMES)
    for name in ("[bold]", *NAMES):
        assert f" {name} " in text.getvalue()
