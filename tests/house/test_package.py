"""What is published: the source distribution, the README outside the repository, versions, and make's targets."""

import pathlib
import re
import subprocess
import tomllib

import jaxops

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINK = re.compile(r"\[[^\]]+\]\((?!https?:|#)([^)#]+)")


def test_links_of_the_readme():
    """Each leads to a file of the source distribution, and none is left in the package's metadata."""
    readme = (ROOT / "README.md").read_text()
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"] + ["/LICENSE"]
    links = LINK.findall(readme)
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).exists()
        assert any(f"/{link}".startswith(top) for top in included), link
    (change,) = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    published = re.sub(change["pattern"], change["replacement"], readme)
    assert not LINK.findall(published)
    assert "(docs/training.md)" in published


def test_make_without_a_target_lists_all():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"\.PHONY: (.*)", makefile)
    assert targets is not None
    printed = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[1] for line in printed.splitlines()] == targets[1].split()


def test_versions_agree():
    """CITATION.cff names the package's version; pre-commit formats with the ruff of `make lint`."""
    citation, hooks = (ROOT / "CITATION.cff").read_text(), (ROOT / ".pre-commit-config.yaml").read_text()
    assert f"version: {jaxops.__version__}\n" in citation
    (ruff,) = (extra for extra in PROJECT["project"]["optional-dependencies"]["test"] if extra.startswith("ruff=="))
    assert f"rev: v{ruff.removeprefix('ruff==')} " in hooks
