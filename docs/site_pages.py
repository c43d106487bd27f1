"""A MkDocs hook: pages from outside docs/, and links that work on GitHub and on the site."""

import ast
import pathlib
import posixpath
import re

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[1]
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES = FROM_ROOT | {"docs/README.md": "index.md", "examples": "examples.md"}
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = {
    str(file.relative_to(ROOT)): f"pictures/{file.parent.name}/{file.name}" for file in sorted(RESULTS.rglob("*.png"))
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)#]+)(#[^)]*)?\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def examples() -> str:
    """A page of all files in examples/."""
    parts = ["# Examples", "Each is a file in `examples/` and runs on a CPU in seconds; a test runs them all."]
    for file in sorted((ROOT / "examples").glob("*.py")):
        source = file.read_text("utf-8")
        title = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
        parts += [f"## {file.name}", title, f"```python\n{source[source.index('import ') :]}```"]
    return "\n\n".join(parts)


def on_files(files: Files, config) -> Files:
    for source, target in FROM_ROOT.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text("utf-8")))
    files.append(File.generated(config, "examples.md", content=examples()))
    for source, target in PICTURES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page, **kwargs) -> str:
    """Links as files of the repository become links to the site's pages; a file without a page keeps its name."""
    name = page.file.src_uri
    folder = "" if name in FROM_ROOT.values() else posixpath.join("docs", posixpath.dirname(name))

    def changed(link: re.Match) -> str:
        picture, text, path, anchor = link[1], link[2], link[3], link[4] or ""
        source = posixpath.normpath(posixpath.join(folder, path))
        target = PAGES.get(source) or PICTURES.get(source)
        if target is None and source.startswith("docs/") and not source.startswith("docs/notes/"):
            target = source.removeprefix("docs/")
        if target is None:
            return text
        return f"{picture}[{text}]({posixpath.relpath(target, posixpath.dirname(name) or '.')}{anchor})"

    fences = FENCED.findall(markdown)
    prose = [LINK.sub(changed, part) for part in FENCED.split(markdown)]
    return "".join(part + fence for part, fence in zip(prose, [*fences, ""], strict=True))
