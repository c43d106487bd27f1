"""An earlier commit's package beside this one, in one process.

python -m benchmarks.harness.before 2b33942   # writes .before/jaxops_before: that commit's package, renamed

`.before/` is ignored by git; where a benchmark runs elsewhere it must be carried along.
"""

import importlib
import io
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from types import ModuleType

import typer

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".before"
NAME = "jaxops_before"
_COMMIT = "COMMIT"


def rename_package(package: pathlib.Path, folder: pathlib.Path, commit: str) -> None:
    """Copies `package` to folder/jaxops_before and renames every `jaxops` in its sources.

    Strings are renamed too: the copy finds its tuned rows by importlib.resources under its own name, and has a cache
    directory of its own.
    """
    target = folder / NAME
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__"))
    for file in target.rglob("*.py"):
        file.write_text(re.sub(r"\bjaxops\b", NAME, file.read_text("utf-8")), "utf-8")
    (folder / _COMMIT).write_text(commit + "\n", "utf-8")


def load_before(folder: pathlib.Path = FOLDER) -> tuple[ModuleType, str]:
    """(the earlier package, its commit).

    Raises:
      ImportError: the folder has none.
    """
    if not (folder / NAME).is_dir():
        raise ImportError(f"{folder} has no {NAME}: python -m benchmarks.harness.before COMMIT")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(NAME), (folder / _COMMIT).read_text("utf-8").strip()
    finally:
        sys.path.remove(str(folder))


def main(commit: str, folder: str = typer.Option(str(FOLDER))) -> None:
    """Copies the package of a commit."""
    target = pathlib.Path(folder)
    archive = subprocess.run(["git", "archive", commit, "jaxops"], cwd=ROOT, check=True, capture_output=True).stdout
    short = subprocess.run(
        ["git", "rev-parse", "--short", commit], cwd=ROOT, check=True, capture_output=True, encoding="utf-8"
    )
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(unpacked, filter="data")
        rename_package(pathlib.Path(unpacked) / "jaxops", target, short.stdout.strip())
    package, _ = load_before(target)
    files = len(list((target / NAME).rglob("*.py")))
    print(f"{target / NAME}: {files} files of {short.stdout.strip()}, {package.__name__} imports")


if __name__ == "__main__":
    typer.run(main)
