"""The problems of a whole program: found by running it, and tuned one after another."""

import json
import math
import pathlib
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxops import tuning
from jaxops._lib.device import Device
from jaxops._lib.tuned import user_rows
from jaxops.tuning.ops import OPS


class ProgramError(RuntimeError):
    """The program could not be run, or failed."""


def run_recorded(words: Sequence[str], file: pathlib.Path) -> None:
    """Runs `[python] -m MODULE ...` or `[python] FILE.py ...` in this process, and writes its problems as JSON lines,
    also those of a program that fails.

    Raises:
      ProgramError: other words.
    """
    words = list(words)
    if words and pathlib.Path(words[0]).name.startswith("python"):
        del words[0]
    is_module = words[:1] == ["-m"] and len(words) > 1
    if not is_module and not (words and words[0].endswith(".py")):
        raise ProgramError(
            f"{' '.join(words)!r} is no Python program: write 'python -m MODULE ...' or 'python FILE.py'."
        )
    before = sys.argv
    sys.argv = words[1:] if is_module else words
    with tuning.record() as problems:
        try:
            if is_module:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(pathlib.Path(words[0]).resolve().parent))
                runpy.run_path(words[0], run_name="__main__")
        finally:
            sys.argv = before
            file.write_text("".join(_line(problem, count) for problem, count in problems.items()))


def _line(problem: Any, count: int) -> str:
    op = next((name for name, op in OPS.items() if isinstance(problem, op.problem)), None)
    return json.dumps({"op": op, "traced": count, "problem": vars(problem)}) + "\n" if op else ""


def problems_of(words: Sequence[str]) -> list[tuple[Any, int]]:
    """A program's problems, the largest first, and how often each is traced.

    The program runs in a process of its own, so that it leaves no memory of the GPU occupied.

    Raises:
      ProgramError: it cannot be run, or ends with an error before it makes a plan.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "problems.jsonl"
        command = [sys.executable, "-m", "jaxops.tuning", "record", str(file), *words]
        status = subprocess.run(command, check=False).returncode
        lines = file.read_text().splitlines() if file.exists() else []
    found = [(OPS[line["op"]].problem(**line["problem"]), line["traced"]) for line in map(json.loads, lines)]
    if status and not found:
        raise ProgramError(f"{' '.join(words)!r} ended with status {status} before it made a plan.")
    return sorted(found, key=lambda each: -math.prod(size for size in vars(each[0]).values() if type(size) is int))


def untuned(problem: Any, device: Device) -> list[str]:
    """Passes for which the user has no row, of some kernel that runs the problem on the device."""
    name, op = tuning.op_of(problem)
    stored = {op.planner.row_key(row) for row in user_rows(name, device)}
    kernels = op.kernels(problem, device)

    def key(pass_name: str, kernel: str) -> tuple:
        assert op.planner.key is not None
        return *op.planner.key(pass_name, **vars(problem)), kernel

    return [each for each in op.passes(problem) if any(key(each, kernel) not in stored for kernel in kernels)]


def tune_all(
    problems: Iterable[Any],
    *,
    again: bool = False,
    passes: Sequence[str] | None = None,
    dry_run: bool = False,
    check: Callable[[], Any] = lambda: None,
    start: Callable[[str, int], Any] = lambda what, candidates: None,
    say: Callable[[str], Any] = print,
    **how: Any,
) -> list[dict]:
    """Tunes one problem after another and stores its rows at once: a run that is stopped goes on where it was.

    Args:
      again: also passes for which the user has rows.
      passes: of all problems; by default each one's own.
      dry_run: store nothing.
      check: called before each problem; what it raises ends the run.
      start: called before each problem with its name and the number of its candidates.
      say, how: of `tune`.

    Returns:
      All rows.

    Raises:
      TuningError: at the end, if some problems could not be tuned; what `check` raises.
    """
    device, found, failed = tuning.gpu(), [], 0
    for problem in problems:
        name, op = tuning.op_of(problem)
        left = list(op.passes(problem) if passes is None else passes)
        if not again:
            left = [each for each in left if each in untuned(problem, device)]
        if not left or op.is_empty(problem):
            continue
        check()
        kernels = op.kernels(problem, device)
        start(f"{name} {problem}", sum(len(tuning.candidates(problem, p, k, device)) for p in left for k in kernels))
        try:
            rows = tuning.tune(problem, left, say=say, **how)
        except (tuning.TuningError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
            failed += 1  # too large for the card's memory, say: the next problem may be tuned
            say(f"  left out: {str(error).splitlines()[0][:160]}")
            continue
        if not dry_run:
            tuning.store(rows, name)
        found += rows
    if failed:
        raise tuning.TuningError(f"{failed} problems could not be tuned; the reasons stand above.")
    return found
