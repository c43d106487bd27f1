"""The language model's loss with jaxops beside plain XLA, from the same parameters and batches.

python -m benchmarks.loss_curve                                        # 300 steps of the small preset
python -m benchmarks.loss_curve --preset demo --steps 5 --out /tmp/x   # a look at it on a CPU
"""

import dataclasses
import pathlib
import tempfile

import typer
from rich.console import Console

from benchmarks import harness
from models import train_lm
from models.loop import Run, with_steps
from models.precision import PRECISIONS, for_this_machine
from models.presets import PRESETS
from models.tokenizer import Bytes

SIDES = {"jaxops": "auto", "xla": "xla"}


def main(
    preset: str = typer.Option("small"),
    steps: int = typer.Option(300),
    eval_every: int = typer.Option(50),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
) -> None:
    """Appends to <out>/loss_curve.jsonl: at each evaluation both held-out losses and their difference."""
    file = harness.begin("loss_curve", out, smoke=False)
    corpus, precision = train_lm.read_corpus((), Bytes()), PRECISIONS[for_this_machine()]
    heldout: dict[str, dict[int, float]] = {}
    for side, backend in SIDES.items():
        chosen = dataclasses.replace(
            with_steps(train_lm.configure(PRESETS[preset], steps, backend, precision), steps), eval_every=eval_every
        )
        with tempfile.TemporaryDirectory() as folder:
            _, history = train_lm.train(chosen, corpus, "nats a byte", Run(pathlib.Path(folder), Console(quiet=True)))
        heldout[side] = dict(history.heldout)
    for step, loss in heldout["jaxops"].items():
        apart = loss / heldout["xla"][step] - 1
        row = {
            "op": "train",
            "name": preset,
            "dtype": precision.dtype,
            "step": step,
            "heldout": {side: losses[step] for side, losses in heldout.items()},
        }
        harness.append_row(file, row | {"apart": round(apart, 6)} | harness.environment())
        print(f"step {step}: held-out {loss:.4f} and {heldout['xla'][step]:.4f} nats a byte, {apart:+.3%}", flush=True)


if __name__ == "__main__":
    typer.run(main)
