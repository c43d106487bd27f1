"""`python -m jaxops.profiling`: profiles a step of any Python program; compares profiles; measures the card."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from jaxops._lib.python_program import ProgramError
from jaxops._lib.terminal import show_any_text
from jaxops.profiling import Report, ceilings, compare
from jaxops.profiling.program import profile_program

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (ProgramError, ValueError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


# Every word behind the options is the program's.
@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="python -m MODULE ..., or python FILE.py ...")],
    function: Annotated[str, typer.Option(help="name of the jitted step; by default that with most device time.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="steps recorded.")] = 3,
    stop: Annotated[bool, typer.Option("--stop", help="end the program when its step is recorded.")] = False,
    without_graphs: Annotated[
        bool, typer.Option("--without-graphs", help="no CUDA graphs, which hide what launched a kernel.")
    ] = False,
    out: Annotated[pathlib.Path, typer.Option(help="folder of the files that are written.")] = pathlib.Path("profile"),
) -> None:
    """Profile a step of a program: `python -m jaxops.profiling -- python -m models.train lm`."""
    if without_graphs:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    with _one_line_errors():
        report = profile_program(command, function=function, steps=steps, stop=stop)
        files = report.save(out)
    print(report)
    for file in files:
        print(f"wrote {file}")
    sys.stdout.flush()
    if stop:
        os._exit(0)  # threads of a program that was ended in the middle may never end


@app.command("compare")
def compare_files(
    before: pathlib.Path,
    after: pathlib.Path,
    fail_above: Annotated[
        str, typer.Option(help="exit with status 1 if the step is slower by more than this, e.g. 5%.")
    ] = "",
) -> None:
    """Compare two reports (profile.json), kernel by kernel."""
    share = None if not fail_above else _percent(fail_above)
    with _one_line_errors():
        comparison = compare(Report.load(before), Report.load(after))
    print(comparison)
    if share is not None and comparison.slower_by(share):
        typer.echo(f"the step is {comparison.ratio - 1:.1%} slower, more than {share:.1%}.", err=True)
        raise typer.Exit(1)


def _percent(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise typer.BadParameter(f"{text!r}: write a percentage, e.g. 5%.", param_hint="--fail-above")
    return share


@app.command("ceilings")
def show_ceilings(again: Annotated[bool, typer.Option("--again", help="measure once more.")] = False) -> None:
    """Show what this card can do, measured once."""
    print(ceilings(again=again))


def main() -> None:
    """Words behind a -- are a program's: without a command before them they are `run`'s."""
    show_any_text()
    words = sys.argv[1:]
    if "--" in words and words[0] not in ("run", "compare", "ceilings"):
        sys.argv.insert(1, "run")
    app()


if __name__ == "__main__":
    main()
