"""`python -m jaxops.tuning OP --shape ...`: each op's command."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer

from jaxops import tuning
from jaxops._lib.fp8 import SCALINGS
from jaxops.ops import adaln, fp8_matmul, quantize
from jaxops.ops.adaln.plan import PASSES as ADALN_PASSES
from jaxops.ops.grouped_matmul import Problem
from jaxops.ops.grouped_matmul.plan import PASSES
from jaxops.ops.quantize.plan import LAYOUTS

DTYPES = ("bfloat16", "float16", "float32")


def _one_of(known: Sequence[str], several: bool = True) -> Callable[[str], str]:
    """A check of an option's value, or of each of them where commas separate several."""

    def check(text: str) -> str:
        for word in text.split(",") if several else [text]:
            if word not in known:
                raise typer.BadParameter(f"{word!r} is not one of {', '.join(known)}.")
        return text

    return check


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Ends the command with an error's words, and no traceback."""
    try:
        yield
    except (tuning.TuningError, NotImplementedError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


Dtype = Annotated[
    str, typer.Option(help=f"of the operands, one of {', '.join(DTYPES)}.", callback=_one_of(DTYPES, False))
]
DryRun = Annotated[bool, typer.Option(help="measure and print, store nothing.")]
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measures plans on this machine's GPU and stores the fastest in your cache directory.",
)


@app.command("grouped-matmul")
def grouped_matmul_command(
    shape: Annotated[list[str], typer.Option(help="G,M,K,N of the forward pass; may be repeated.")],
    dtype: Dtype = "bfloat16",
    passes: Annotated[
        str, typer.Option(help="comma-separated, among fwd, dgrad and wgrad.", callback=_one_of(PASSES))
    ] = ",".join(PASSES),
    dry_run: DryRun = False,
) -> None:
    """The three passes of `jaxops.grouped_matmul`."""
    for G, M, K, N in [_numbers(text, 4, "four numbers, G,M,K,N") for text in shape]:
        with _one_line():
            rows = tuning.tune(Problem(G, M, K, N, dtype), passes.split(","))
        if not dry_run:
            print(f"stored in {tuning.store(rows)}")


@app.command("adaln")
def adaln_command(
    shape: Annotated[list[str], typer.Option(help="T,D,B: rows, their width, sequences; may be repeated.")],
    dtype: Dtype = "bfloat16",
    passes: Annotated[
        str, typer.Option(help="comma-separated, among fwd and bwd.", callback=_one_of(ADALN_PASSES))
    ] = ",".join(ADALN_PASSES),
    dry_run: DryRun = False,
) -> None:
    """Both passes of `jaxops.adaln` and of `jaxops.gated_residual_adaln`."""
    for T, D, B in [_numbers(text, 3, "three numbers, T,D,B") for text in shape]:
        for gated in (False, True):
            with _one_line():
                rows = tuning.tune_adaln(adaln.Problem(T, D, B, dtype, gated), passes.split(","))
            if not dry_run:
                print(f"stored in {tuning.store(rows, 'adaln')}")


@app.command("quantize")
def quantize_command(
    shape: Annotated[list[str], typer.Option(help="M,K of the tensor; may be repeated.")],
    scaling: Annotated[str, typer.Option(help="comma-separated.", callback=_one_of(SCALINGS))] = ",".join(SCALINGS),
    layouts: Annotated[
        str, typer.Option(help="comma-separated, among row, col and both.", callback=_one_of(LAYOUTS))
    ] = ",".join(LAYOUTS),
    dtype: Dtype = "bfloat16",
    dry_run: DryRun = False,
) -> None:
    """`jaxops.quantize`, each scaling in each layout."""
    shapes = [_numbers(text, 2, "two numbers, M,K") for text in shape]
    for (M, K), scaled, layout in itertools.product(shapes, scaling.split(","), layouts.split(",")):
        with _one_line():
            rows = tuning.tune_quantize(quantize.Problem(M, K, dtype, scaled, layout))
        if not dry_run:
            print(f"stored in {tuning.store(rows, 'quantize')}")


@app.command("fp8-matmul")
def fp8_matmul_command(
    shape: Annotated[
        list[str], typer.Option(help="G,M,K,N of the forward pass, G = 0 for a dense one; may be repeated.")
    ],
    recipes: Annotated[
        str, typer.Option(help="comma-separated.", callback=_one_of(tuple(fp8_matmul.RECIPES)))
    ] = "tensorwise,rowwise,blockwise",
    passes: Annotated[
        str, typer.Option(help="comma-separated, among fwd, dgrad and wgrad.", callback=_one_of(PASSES))
    ] = ",".join(PASSES),
    dtype: Dtype = "bfloat16",
    dry_run: DryRun = False,
) -> None:
    """The products of `jaxops.fp8_matmul` and `jaxops.fp8_grouped_matmul`."""
    shapes = [_numbers(text, 4, "four numbers, G,M,K,N") for text in shape]
    for (G, M, K, N), recipe in itertools.product(shapes, recipes.split(",")):
        with _one_line():
            rows = tuning.tune_fp8_matmul(fp8_matmul.Problem(M, K, N, recipe, dtype, G), passes.split(","))
        if not dry_run:
            print(f"stored in {tuning.store(rows, 'fp8_matmul')}")


def _numbers(text: str, count: int, wanted: str) -> list[int]:
    words = text.split(",")
    if len(words) != count or not all(word.strip().isdecimal() for word in words):
        raise typer.BadParameter(f"{text!r}: write {wanted}.")
    return [int(word) for word in words]


if __name__ == "__main__":
    app()
