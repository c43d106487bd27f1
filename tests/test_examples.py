"""The files in examples/ run and pass their own checks."""

import pathlib
import runpy

import pytest

EXAMPLES = sorted((pathlib.Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example(file):
    runpy.run_path(str(file))["main"]()


def test_examples_are_short():
    assert EXAMPLES
    assert {file.name: lines for file in EXAMPLES if (lines := len(file.read_text().splitlines())) > 60} == {}
