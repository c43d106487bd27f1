"""The training command: `python -m models.train lm`, `dit` and `mm`."""

import os
import sys

import jax
import typer

try:
    from models.training import dit as train_dit
    from models.training import lm as train_lm
    from models.training import mm as train_mm
except ModuleNotFoundError as error:
    if __name__ != "__main__" or (error.name or "").startswith("models"):
        raise
    sys.exit(f"{error}. The training command needs more packages than jaxops: pip install '.[models]' in the checkout.")

app = typer.Typer(
    help="Trains one of the models; each COMMAND --help has its options.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # errors are a line, which a box would break
)
app.command("lm")(train_lm.main)
app.command("dit")(train_dit.main)
app.command("mm")(train_mm.main)


def main() -> None:
    try:
        app()
    except SystemExit as ended:
        sys.stdout.flush()
        sys.stderr.flush()
        if ended.code and jax.process_count() == 1:
            # What a failed write has left behind would print as Python ends.
            os._exit(ended.code if isinstance(ended.code, int) else 1)
        raise


if __name__ == "__main__":
    main()
