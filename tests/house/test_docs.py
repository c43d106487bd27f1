"""The README and the guides tell the truth: their examples run, their commands, links and names exist."""

import importlib.util
import pathlib
import pkgutil
import re
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "README.md", *GUIDES)}
ALL_TEXT = "\n".join(TEXTS.values())
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)]+)\)")


def blocks_of(text: str, language: str) -> list[re.Match]:
    return [block for block in FENCED.finditer(text) if block[1] == language]


def run(name: str, text: str) -> None:
    """All Python blocks in one namespace and in order, as they are read."""
    namespace = {"__name__": pathlib.PurePath(name).stem}
    for block in blocks_of(text, "python"):
        lines_before = text.count("\n", 0, block.start(2))
        exec(compile("\n" * lines_before + block[2], name, "exec"), namespace)  # a traceback shows the file's own line


def anchors_of(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(name: str, text: str) -> list[str]:
    """Links to files that are not there, or to headings that they do not have."""
    broken = []
    for link in LINK.findall(FENCED.sub("", text)):
        path, _, anchor = link.partition("#")
        file = (ROOT / name).parent / path
        if not file.exists() or (anchor and anchor not in anchors_of(file.read_text() if path else text)):
            broken.append(link)
    return broken


def unknown_names(text: str) -> list[str]:
    """Those written `jaxops.xyz`, in prose or code, that cannot be imported or are private."""
    unknown = []
    for name in sorted(set(re.findall(r"\bjaxops(?:\.[A-Za-z_]\w*)+", text))):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            unknown.append(name)
        else:
            if "._" in name:
                unknown.append(name)
    return unknown


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if blocks_of(text, "python")])
def test_examples(name):
    run(name, TEXTS[name])


def test_every_block_is_run_or_marked():
    """A block in any other language than Python is `text`, so that none stays out of the tests unseen."""
    assert {block[1] for block in FENCED.finditer(ALL_TEXT)} == {"python", "text"}


@pytest.mark.parametrize("name", TEXTS)
def test_names_exist(name):
    assert unknown_names(TEXTS[name]) == []


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z-]+)", ALL_TEXT))))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python3? -m ([\w.]+)", ALL_TEXT))))
def test_commands_exist(module):
    assert importlib.util.find_spec(module)


@pytest.mark.parametrize("name", [*TEXTS, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name):
    assert broken_links(name, (ROOT / name).read_text()) == []


@pytest.mark.parametrize("guide", [file.name for file in GUIDES if file.name != "README.md"])
def test_every_guide_is_in_the_index(guide):
    assert f"]({guide})" in TEXTS["docs/README.md"]


def test_what_is_wrong_is_seen():
    text = textwrap.dedent("""\
        # A title

        [here](#a-title), [there](README.md#install), [not there](#no-title), [nowhere](nowhere.md)
        `jaxops.grouped_matmul`, `jaxops.no_such_op`, `jaxops._lib.fp8`

        ```text
        [this](is.code)
        1 / 0
        ```

        ```python
        assert __name__ == "guide"
        undefined
        ```
        """)
    assert broken_links("README.md", text) == ["#no-title", "nowhere.md"]
    assert unknown_names(text) == ["jaxops._lib.fp8", "jaxops.no_such_op"]
    with pytest.raises(NameError) as caught:
        run("guide.md", text)
    assert caught.traceback[-1].lineno + 1 == 13
