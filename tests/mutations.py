"""Breaks the code one line at a time and expects the suite to turn red. A mutation that survives is a hole in the tests.

`python tests/mutations.py` tries all; `python tests/mutations.py offload "fp8_matmul mask"` those with one of these texts in their names. `--jobs 8` runs
eight at a time. Those of the Gluon kernels ("triton ...") need a Hopper GPU and are left out elsewhere.

The tables are in tests/mutants/, an entry each: (file, a line's text, what stands there instead, the tests that must see it).
"""

import argparse
import concurrent.futures
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile

import pytest
from mutants import adaln, benchmarks, files, fp8, grouped_matmul, models, moe, offload, parallel, triton

ROOT = pathlib.Path(__file__).parents[1]
# The folder that a table's files are in, and which of the named tests run.
ON_CPU, ON_GPU = ["-k", "not gpu"], ["-m", "gpu"]
TABLES = (
    ("jaxops", grouped_matmul.MUTATIONS, ON_CPU),
    ("jaxops", adaln.MUTATIONS, ON_CPU),
    ("jaxops", fp8.MUTATIONS, ON_CPU),
    ("jaxops", moe.MUTATIONS, ON_CPU),
    ("jaxops", offload.MUTATIONS, ON_CPU),
    ("jaxops", parallel.MUTATIONS, ON_CPU),
    ("models", models.MUTATIONS, ON_CPU),
    ("models", files.MUTATIONS, ON_CPU),
    ("benchmarks", benchmarks.MUTATIONS, ON_CPU),
    ("jaxops", triton.COMPILED, ON_CPU),
    ("jaxops", triton.MUTATIONS, ON_GPU),
)
_SECONDS = 300  # of a run; a pipeline that is broken may wait for ever


def outcome(root: pathlib.Path, file: str, old: str, new: str, tests: str, which: list[str]) -> str:
    """What the tests make of a copy of the repository at `root` with one text replaced: "SURVIVED", "caught", "hangs", which is caught, too, or "skipped",
    where they need another interpreter."""
    path = root / file
    source = path.read_text()
    assert source.count(old) == 1, (
        f"{file} has {source.count(old)} places that read {old!r}: bring tests/mutants/ up to date."
    )
    path.write_text(source.replace(old, new))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *which, tests]
        search = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        run = subprocess.run(
            command, capture_output=True, text=True, cwd=root, timeout=_SECONDS, env=os.environ | {"PYTHONPATH": search}
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        path.write_text(source)
    if run.returncode < 0 or "CUDA_ERROR" in run.stdout:  # killed by an access that the card refuses
        return "caught"
    if run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        return "skipped"
    assert run.returncode in (0, 1), f"{file}, {old!r}:\n{run.stdout}{run.stderr}"
    return "caught" if run.returncode else "SURVIVED"


def main(texts: list[str], jobs: int) -> None:
    gpu = shutil.which("nvidia-smi") is not None
    chosen = [
        (name, f"{folder}/{file}", *change, which)
        for folder, table, which in TABLES
        for name, (file, *change) in table.items()
        if (gpu or which is ON_CPU) and (not texts or any(text in name for text in texts))
    ]
    if not chosen:
        raise SystemExit(f"no mutation that runs here has one of {texts} in its name.")
    holes = []
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[pathlib.Path] = queue.Queue()
        for i in range(min(jobs, len(chosen))):
            left_out = shutil.ignore_patterns(".git", ".venv*", ".gpu", "__pycache__", "runs", "results")
            copies.put(pathlib.Path(shutil.copytree(ROOT, pathlib.Path(folder) / str(i), ignore=left_out)))

        def try_one(mutation: tuple) -> str:
            root = copies.get()
            try:
                return outcome(root, *mutation)
            finally:
                copies.put(root)

        runs = {pool.submit(try_one, mutation): name for name, *mutation in chosen}
        for run in concurrent.futures.as_completed(runs):
            error = run.exception()
            found = "ERROR" if error else run.result()
            print(f"{found:9}{runs[run]}{f': {error}' if error else ''}", flush=True)
            holes += [runs[run]] * (found in ("SURVIVED", "ERROR"))
    sys.exit(f"{len(holes)} mutations survived, or could not be tried." if holes else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="*", help="of names; none for all")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    arguments = parser.parse_args()
    main(arguments.texts, arguments.jobs)
