"""The problems of a whole program: found by running it, and tuned one after another."""

import json
import math
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxops import tuning
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.tuned import check_can_store, own_rows
from jaxops._lib.python_program import ProgramError, run_program
from jaxops.described import tunings


def run_recorded(words: Sequence[str], file: pathlib.Path) -> None:
    """`run_program`; writes the program's problems as JSON lines, also those of a program that fails."""
    with tuning.record() as problems:
        try:
            run_program(words)
        finally:
            file.write_text("".join(_line(problem, count) for problem, count in problems.items()), "utf-8")


def _line(problem: Any, count: int) -> str:
    """Nothing for an op without tuned rows, and for sizes that are symbols: no shape is known."""
    op = next((name for name, op in tunings().items() if isinstance(problem, op.problem)), None)
    fields = vars(problem)
    if op is None or not all(isinstance(value, (int, str)) for value in fields.values()):
        return ""
    return json.dumps({"op": op, "traced": count, "problem": fields}) + "\n"


def problems_of(words: Sequence[str], say: Callable[[str], Any] = print) -> list[tuple[Any, int]]:
    """A program's problems, the largest first, and how often each is traced.

    The program runs in a process of its own, so that it leaves no memory of the GPU occupied.

    Raises:
      ProgramError: it cannot be run, or makes no plan of an op with tuned rows.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "problems.jsonl"
        command = [sys.executable, "-m", "jaxops.tuning", "record", str(file), *words]
        status = subprocess.run(command, check=False).returncode
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
    known = ", ".join(tunings())
    found = [(tunings()[line["op"]].problem(**line["problem"]), line["traced"]) for line in map(json.loads, lines)]
    if not found:
        raise ProgramError(f"{' '.join(words)!r} ended with status {status} and made no plan of {known}.")
    if status:
        say(f"The program ended with status {status}; these are the problems until then.")

    def size(problem: Any) -> int:
        return math.prod(max(value, 1) for value in vars(problem).values() if type(value) is int)

    return sorted(found, key=lambda each: -size(each[0]))


def untuned(problem: Any, device: Device) -> list[str]:
    """Passes for which the user has no row, of some kernel that runs the problem on the device."""
    name, op = tuning.op_of(problem)
    stored = {op.planner.row_key(row) for row in own_rows(name, device)}
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
    say: Callable[[str], Any] = print,
) -> list[dict]:
    """Tunes pass after pass and stores its rows at once: a run that is stopped goes on where it was.

    Args:
      again: also passes for which the user has rows.
      passes: of all problems; by default each one's own.
      dry_run: store nothing.
      check: called before each pass; what it raises ends the run.
      say: called with each line of progress.

    Returns:
      All rows.

    Raises:
      TuningError: the rows could not be stored; at the end, if some passes could not be tuned; what `check` raises.
    """
    device, found, failed = tuning.gpu(), [], 0
    problems = list(problems)
    for name in () if dry_run else dict.fromkeys(tuning.op_of(problem)[0] for problem in problems):
        try:
            check_can_store(name, device)
        except OSError as error:
            hint = "set XDG_CACHE_HOME to the absolute path of a folder that you can write, or pass --dry-run"
            raise tuning.TuningError(f"tuned rows of {name} cannot be stored ({error}): {hint}.") from error
    for problem in problems:
        name, op = tuning.op_of(problem)
        if op.is_empty(problem):
            say(f"{name} {problem}: a size is 0, no kernel runs")
            continue
        for each in op.passes(problem) if passes is None else passes:
            if not again and each not in untuned(problem, device):
                continue
            check()
            try:
                count = sum(len(tuning.candidates(problem, each, k, device)) for k in op.kernels(problem, device))
                say(f"{name} {problem} {each}, {count} candidates")
                rows = tuning.tune(problem, [each], say=say)
            except (NotImplementedError, RuntimeError, ValueError) as error:
                failed += 1  # too large for the card's memory, say: the next pass may be tuned
                say(f"  left out: {(str(error).splitlines() or [type(error).__name__])[0][:160]}")
                continue
            if not dry_run:
                tuning.store(rows)
            found += rows
    if failed:
        raise tuning.TuningError(f"{failed} passes could not be tuned; the reasons stand above.")
    return found
