"""The tables in tests/mutants/ fit the sources: tests/mutations.py, which takes a quarter of an hour, is seldom run whole."""

import sys

import pytest

from tests.house.test_limits import ROOT


@pytest.fixture(scope="module")
def mutations():
    """It stands beside its tables, which are no package of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tests"))
        import mutations  # pyright: ignore[reportMissingImports]

        yield mutations
    del sys.modules["mutations"]


def test_each_breaks_one_place_and_names_tests(mutations):
    for folder, table, _ in mutations.TABLES:
        for name, (file, old, new, tests) in table.items():
            assert (ROOT / folder / file).read_text().count(old) == 1, name
            assert old != new, name
            path, *function = tests.split("::")
            assert (ROOT / path).exists(), name
            if function:
                assert f"def {function[0].split('[')[0]}(" in (ROOT / path).read_text(), name
