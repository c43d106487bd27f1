"""Runs a benchmark by its name, in whichever folder it is: `python -m benchmarks adaln --smoke --out /tmp/x`."""

import importlib
import pathlib
import sys

import typer


def main() -> None:
    files = {file.stem.removeprefix("bench_"): file for file in pathlib.Path(__file__).parent.glob("*/bench_*.py")}
    sys.argv = sys.argv[1:]
    if not sys.argv or sys.argv[0] not in files:
        sys.exit(f"python -m benchmarks NAME [OPTIONS]: NAME is one of {', '.join(sorted(files))}.")
    file = files[sys.argv[0]]
    typer.run(importlib.import_module(f"benchmarks.{file.parent.name}.{file.stem}").main)


if __name__ == "__main__":
    main()
