"""README.md and docs/: code blocks run; commands, links and names exist; the API reference has every public name."""

import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import re

import pytest

import jaxops

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
TEXTS = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "README.md", *GUIDES)}
ALL_TEXT = "\n".join(TEXTS.values())
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)]+)\)")


def blocks_of(text: str, language: str) -> list[re.Match]:
    return [block for block in FENCED.finditer(text) if block[1] == language]


def run(name: str, text: str) -> None:
    """All Python blocks in order, in one namespace."""
    namespace = {"__name__": pathlib.PurePath(name).stem}
    for block in blocks_of(text, "python"):
        lines_before = text.count("\n", 0, block.start(2))
        exec(compile("\n" * lines_before + block[2], name, "exec"), namespace)  # a traceback shows the file's own line


def anchors_of(text: str) -> set[str]:
    """GitHub's anchors of the headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(name: str, text: str) -> list[str]:
    """Links to missing files or headings."""
    broken = []
    for link in LINK.findall(FENCED.sub("", text)):
        path, _, anchor = link.partition("#")
        file = (ROOT / name).parent / path
        if not file.exists() or (anchor and anchor not in anchors_of(file.read_text() if path else text)):
            broken.append(link)
    return broken


def unknown_names(text: str) -> list[str]:
    """Names `jaxops.xyz`, in prose or code, that cannot be imported or are private."""
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
    """Blocks that are not Python are marked `text`, so that no code block stays untested by accident."""
    assert {block[1] for block in FENCED.finditer(ALL_TEXT)} == {"python", "text"}


def test_names_exist():
    """Only the page on writing kernels names private modules."""
    unknown = {name: names for name, text in TEXTS.items() if (names := unknown_names(text))}
    own = "jaxops.ops.gated_rms_norm."  # the page's example
    extending = [name for name in unknown.pop("docs/extending.md") if not name.startswith(own)]
    assert unknown == {}
    assert all(name.startswith("jaxops._lib.") and importlib.util.find_spec(name) for name in extending)


def test_arguments_in_the_tables_of_ops():
    """One that is passed by name only has a `=`, and no other has."""
    rows = re.findall(r"^\| `jaxops\.(\w+)` \| (.*?) \|", TEXTS["docs/ops.md"], re.MULTILINE)
    assert len(rows) > 15
    for op, text in rows:
        parameters = inspect.signature(getattr(jaxops, op)).parameters
        for name, by_name in re.findall(r"\b([a-z]\w*)\b(=?)", re.sub(r"\(.*?\)", "", text)):
            if name in parameters:
                assert bool(by_name) == (parameters[name].kind is inspect.Parameter.KEYWORD_ONLY), f"{op}: {name}"


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z-]+)", ALL_TEXT)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for module in set(re.findall(r"python3? -m ([\w.]+)", ALL_TEXT)):
        assert importlib.util.find_spec(module), module


def test_links_lead_somewhere():
    names = [*TEXTS, "CONTRIBUTING.md", "CHANGELOG.md", *(str(file.relative_to(ROOT)) for file in REFERENCE)]
    assert {name: broken for name in names if (broken := broken_links(name, (ROOT / name).read_text()))} == {}


def test_every_page_is_in_the_index_and_on_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for file in (*GUIDES, *REFERENCE):
        page = str(file.relative_to(ROOT / "docs"))
        assert page == "README.md" or (f"]({page})" in TEXTS["docs/README.md"] and f": {page}\n" in navigation), page


def test_the_reference_has_every_public_name():
    names = ("jaxops", "jaxops.nn", "jaxops.offload", "jaxops.profiling", "jaxops.tuning")
    modules = {name: importlib.import_module(name) for name in names}
    public = [f"{name}.{public}" for name, module in modules.items() for public in module.__all__]
    listed = re.findall(r"^::: (\S+)$", "\n".join(file.read_text() for file in REFERENCE), re.MULTILINE)
    assert sorted(listed) == sorted(public)
