"""The training command: `python -m models.train lm` and `python -m models.train dit`."""

import typer

from models import train_dit, train_lm

app = typer.Typer(help="Trains one of the models; each COMMAND --help has its options.", no_args_is_help=True, add_completion=False)
app.command("lm")(train_lm.main)
app.command("dit")(train_dit.main)

if __name__ == "__main__":
    app()
