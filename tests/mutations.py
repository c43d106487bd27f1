"""Breaks the code one line at a time and expects the suite to turn red. A mutation that survives is a hole in the tests.

`python tests/mutations.py` tries all; `python tests/mutations.py offload "fp8_matmul mask"` those with one of these texts in their names.

The tables are in tests/mutants/, an entry each: (file, a line's text, what stands there instead, the tests that must see it).
"""

import pathlib
import subprocess
import sys

from mutants import adaln, benchmarks, fp8, grouped_matmul, models, moe, offload

ROOT = pathlib.Path(__file__).parents[1]
# The folder that a table's files are in.
TABLES = (
    ("jaxops", grouped_matmul.MUTATIONS),
    ("jaxops", adaln.MUTATIONS),
    ("jaxops", fp8.MUTATIONS),
    ("jaxops", moe.MUTATIONS),
    ("jaxops", offload.MUTATIONS),
    ("models", models.MUTATIONS),
    ("benchmarks", benchmarks.MUTATIONS),
)


def survives(path: pathlib.Path, old: str, new: str, tests: str) -> bool:
    source = path.read_text()
    if source.count(old) != 1:
        raise SystemExit(f"{path.relative_to(ROOT)} has {source.count(old)} places that read {old!r}: bring tests/mutants/ up to date.")
    try:
        path.write_text(source.replace(old, new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-k", "not gpu", tests]
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    finally:
        path.write_text(source)
    if run.returncode not in (0, 1):
        raise SystemExit(run.stdout + run.stderr)
    return run.returncode == 0


def main(texts: list[str]) -> None:
    chosen = [
        (name, ROOT / folder / file, *change)
        for folder, table in TABLES
        for name, (file, *change) in table.items()
        if not texts or any(text in name for text in texts)
    ]
    if not chosen:
        raise SystemExit(f"no mutation's name has one of {texts} in it.")
    holes = []
    for name, *mutation in chosen:
        alive = survives(*mutation)
        print(f"{'SURVIVED' if alive else 'caught':9}{name}", flush=True)
        holes += [name] * alive
    sys.exit(f"{len(holes)} mutations survived: the tests cannot see them." if holes else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
