"""`python -m jaxops.tuning`: tunes shapes, or those of a whole program; lists, exports and deletes what it stored."""

import contextlib
import itertools
import pathlib
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from jaxops import tuning
from jaxops._lib.card import disturbance
from jaxops._lib.planning.description import Tuning
from jaxops._lib.planning.tuned import export_rows, remove_rows, rows_in, user_file, user_files, user_folder
from jaxops._lib.python_program import ProgramError
from jaxops._lib.terminal import show_any_text
from jaxops.described import tunings
from jaxops.profiling.tables import table
from jaxops.tuning.program import problems_of, run_recorded, tune_all, untuned

_DTYPES = ("bfloat16", "float16", "float32")
_ERRORS = (tuning.TuningError, ProgramError, NotImplementedError, ValueError, OSError)
app = typer.Typer(add_completion=False, invoke_without_command=True)

Again = Annotated[bool, typer.Option(help="also passes that have rows of yours.")]
DryRun = Annotated[bool, typer.Option(help="measure and print, store nothing.")]
Force = Annotated[bool, typer.Option(help="also on a card that is shared or runs at lower clocks.")]
OneOp = Annotated[str, typer.Argument(help=f"one of {', '.join(tunings()).replace('_', '-')}; by default all.")]


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def _word(text: str, known: Sequence[str]) -> str:
    if text not in known:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(known)}.")
    return text


def _op(text: str) -> str:
    """The op's name, or a pattern for all ops."""
    return _word(text.replace("-", "_"), tuple(tunings())) if text else "*"


def _sizes(text: str, names: tuple[str, ...]) -> dict[str, int]:
    words = text.split(",")
    if len(words) != len(names) or not all(word.strip().isdecimal() for word in words):
        raise typer.BadParameter(f"{text!r}: write numbers for {','.join(names)}.")
    return dict(zip(names, map(int, words), strict=True))


def _values(op: Tuning, words: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The values of the op's own fields: their defaults, or those of options such as --scaling rowwise,tensorwise."""
    values = {field: default for field, (_, default) in op.values.items()}
    options = " ".join(words)
    pairs = re.findall(r"--(\w+)[= ](\S+)", options)
    if not re.fullmatch(r"(--\w+[= ]\S+ ?)*", options) or not {field for field, _ in pairs} <= values.keys():
        own = ", ".join(f"--{field}" for field in values) or "none"
        raise typer.BadParameter(f"{options!r}: the op's own options are {own}.")
    for field, text in pairs:
        known = {str(value): value for value in op.values[field][0]}
        values[field] = [known[_word(each, tuple(known))] for each in text.split(",")]
    return values


def _check_card() -> None:
    if found := disturbance():
        raise tuning.TuningError(f"{found}: tune on a cool card of your own, or pass --force.")


def _tune(
    problems: Sequence[Any], force: bool, *, again: bool, dry_run: bool, passes: Sequence[str] | None = None
) -> None:
    """Tunes the problems and says what each pass gained."""
    check = (lambda: None) if force else _check_card
    with _one_line_errors():
        rows = tune_all(problems, again=again, passes=passes, dry_run=dry_run, check=check)
    if not rows:
        print("Nothing to tune." if again else "Nothing to tune; --again measures passes that have rows of yours.")
    elif not dry_run:
        for name in dict.fromkeys(row["op"] for row in rows):
            print(f"stored in {user_file(name, tuning.gpu())}")


@app.callback()
def main(
    context: typer.Context,
    from_step: Annotated[
        str, typer.Option(help='run this program, e.g. "python -m models.train lm --steps 2", and tune its shapes.')
    ] = "",
    again: Again = False,
    dry_run: DryRun = False,
    force: Force = False,
) -> None:
    """Measures plans on this machine's GPU and stores the fastest in your cache directory.

    With --from-step passes that have rows of yours are left out: a run that is stopped goes on where it was.
    """
    show_any_text()
    if context.invoked_subcommand is not None:
        if from_step or again or dry_run or force:
            raise typer.BadParameter(f"write the options behind {context.invoked_subcommand}.")
        return
    if not from_step:
        print(context.get_help())
        raise typer.Exit(2)
    with _one_line_errors():
        problems = problems_of(shlex.split(from_step))
    device = tuning.current_device()
    rows = [
        [tuning.op_of(problem)[0], str(problem), str(count), ", ".join(untuned(problem, device)) or "none"]
        for problem, count in problems
    ]
    print(table("op|problem|>traced|passes without a row of yours", rows))
    _tune([problem for problem, _ in problems], force, again=again, dry_run=dry_run)


def _add_command(name: str, op: Tuning) -> None:
    """The command that tunes shapes of one op."""

    own = "".join(f" --{field} {','.join(map(str, known))}" for field, (known, _) in op.values.items())
    help_text = f"Tune shapes of {name}." + (f" Its own options, with some of these values:{own}." if own else "")

    # What is no option here may be one of the op.
    @app.command(
        name.replace("_", "-"),
        help=help_text,
        no_args_is_help=True,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def command(
        context: typer.Context,
        shape: Annotated[list[str], typer.Option(help=f"{','.join(op.shape)} of the forward; may be repeated.")],
        dtype: Annotated[str, typer.Option(help=f"of the operands, one of {', '.join(_DTYPES)}.")] = "bfloat16",
        passes: Annotated[str, typer.Option(help="comma-separated; by default all.")] = "",
        dry_run: DryRun = False,
        force: Force = False,
    ) -> None:
        shapes, values = [_sizes(text, op.shape) for text in shape], _values(op, context.args)
        chosen = [_word(each, op.planner.passes) for each in passes.split(",")] if passes else None
        kind = {"dtype": _word(dtype, _DTYPES)} if "dtype" in op.problem.__dataclass_fields__ else {}
        problems = [
            op.problem(**sizes, **kind, **dict(zip(values, each, strict=True)))
            for sizes, each in itertools.product(shapes, itertools.product(*values.values()))
        ]
        _tune(problems, force, again=True, passes=chosen, dry_run=dry_run)


for _name, _tuning in tunings().items():
    _add_command(_name, _tuning)


@app.command("list")
def list_rows(op: OneOp = "") -> None:
    """Show your rows."""
    with _one_line_errors():
        stored = {file: rows_in(file) for file in user_files(_op(op))}
    lines = []
    for file, rows in stored.items():
        fields = tunings()[file.parent.name].problem.__dataclass_fields__ if file.parent.name in tunings() else ()
        for row in rows:
            problem = ", ".join(f"{name}={row[name]}" for name in fields if name in row)
            tiles = ", ".join(f"{name}={value}" for name, value in row.get("tiles", {}).items())
            speed = next((f"{row[unit]} {unit}" for unit in ("tflops", "gbps") if unit in row), "")
            gain = f"{row['gain_percent']} %" if "gain_percent" in row else ""
            made = f"{row.get('date', '')}, jax {row.get('jax', '')}"
            us = str(row.get("us", ""))
            lines.append([file.parent.name, file.stem, row.get("pass", ""), problem, tiles, us, speed, gain, made])
    titles = "op|device|pass|for|tiles|>us|>speed|>gain|measured"
    print(table(titles, lines) if lines else f"No rows in {user_folder()}.")


@app.command()
def export(folder: pathlib.Path, op: OneOp = "") -> None:
    """Copy your rows to a folder, for another machine and for jaxops.tuning.use_rows."""
    with _one_line_errors():
        _print_files("copied to", export_rows(folder, _op(op)))


@app.command()
def clear(op: OneOp = "", yes: Annotated[bool, typer.Option("--yes", help="do not ask.")] = False) -> None:
    """Delete your rows."""
    pattern = _op(op)
    with _one_line_errors():
        for file in (files := user_files(pattern)):
            print(file)
        if files and not yes:
            typer.confirm("Delete these files?", abort=True)
        _print_files("deleted", remove_rows(pattern))


def _print_files(done: str, files: Sequence[pathlib.Path]) -> None:
    for file in files:
        print(f"{done} {file}")
    if not files:
        print(f"No rows in {user_folder()}.")


# Every word after the file is the program's.
@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def record(file: pathlib.Path, command: list[str]) -> None:
    """Run a program and write the problems that it makes plans for."""
    try:
        run_recorded(command, file)
    except ProgramError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
