"""The README tells the truth: its examples run, its commands exist."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = list(re.finditer(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))


def test_examples():
    """All in one namespace and in order, as they are read."""
    assert BLOCKS
    namespace = {"__name__": "readme"}
    for block in BLOCKS:
        lines_before = TEXT.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_before + block[1], "README.md", "exec"), namespace)  # a traceback shows the README's own line


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z-]+)", TEXT))))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python3? -m ([\w.]+)", TEXT))))
def test_commands_exist(module):
    assert importlib.util.find_spec(module)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
