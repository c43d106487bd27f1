"""`python -m jaxops.tuning OP --shape ...`"""

import itertools
from collections.abc import Sequence
from typing import Annotated

import typer

from jaxops import tuning
from jaxops.tuning.ops import OPS

_DTYPES = ("bfloat16", "float16", "float32")
_SHAPES = "; ".join(f"{name.replace('_', '-')}: {','.join(op.shape)}" for name, op in OPS.items())
app = typer.Typer(add_completion=False)


def _words(text: str, known: Sequence[str]) -> list[str]:
    """The comma-separated words of an option."""
    for word in text.split(","):
        if word not in known:
            raise typer.BadParameter(f"{word!r} is not one of {', '.join(known)}.")
    return text.split(",")


def _sizes(text: str, names: tuple[str, ...]) -> dict[str, int]:
    words = text.split(",")
    if len(words) != len(names) or not all(word.strip().isdecimal() for word in words):
        raise typer.BadParameter(f"{text!r}: write numbers for {','.join(names)}.")
    return dict(zip(names, map(int, words), strict=True))


@app.command(no_args_is_help=True)
def main(
    op: Annotated[str, typer.Argument(help=f"one of {', '.join(OPS).replace('_', '-')}.")],
    shape: Annotated[
        list[str], typer.Option(help=f"of the forward pass ({_SHAPES}, G = 0 for no groups); may be repeated.")
    ],
    dtype: Annotated[str, typer.Option(help=f"of the operands, one of {', '.join(_DTYPES)}.")] = "bfloat16",
    passes: Annotated[str, typer.Option(help="comma-separated, e.g. fwd,wgrad; by default all.")] = "",
    scaling: Annotated[str, typer.Option(help="of quantize, comma-separated; by default all.")] = "",
    layouts: Annotated[str, typer.Option(help="of quantize, comma-separated; by default all.")] = "",
    recipes: Annotated[str, typer.Option(help="of fp8-matmul, comma-separated.")] = "",
    dry_run: Annotated[bool, typer.Option(help="measure and print, store nothing.")] = False,
) -> None:
    """Measures plans on this machine's GPU and stores the fastest in your cache directory."""
    name = _words(op.replace("-", "_"), tuple(OPS))[0]
    tunable, dtype = OPS[name], _words(dtype, _DTYPES)[0]
    shapes = [_sizes(text, tunable.shape) for text in shape]
    chosen = _words(passes, tunable.planner.passes) if passes else None
    values = {field: default for field, (_, default) in tunable.values.items()}
    for field, text in (("scaling", scaling), ("layouts", layouts), ("recipe", recipes)):
        if text and field not in values:
            raise typer.BadParameter(f"{op} has no {field}.")
        if text:
            values[field] = _words(text, tunable.values[field][0])
    for sizes, each in itertools.product(shapes, itertools.product(*values.values())):
        problem = tunable.problem(**sizes, dtype=dtype, **dict(zip(values, each, strict=True)))
        try:
            rows = tuning.tune(problem, chosen)
        except (tuning.TuningError, NotImplementedError, ValueError) as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(1) from error
        if not dry_run:
            print(f"stored in {tuning.store(rows, name)}")


if __name__ == "__main__":
    app()
