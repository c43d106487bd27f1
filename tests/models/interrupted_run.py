"""A tiny training run for tests/models/test_launch.py, and one whose two processes are killed during a write."""

import gc
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from models.decoder import DecoderConfig
from models.training import lm as train_lm
from models.training import loop
from models.training.presets import PRESETS, Preset

EVERY = 2
TOO_LONG_S = 60  # after which a test that went wrong ends
MODEL = DecoderConfig(
    256, 16, layers=2, heads=2, kv_heads=2, head_dim=8, hidden=16, tie_embeddings=True
)  # dense: experts take thrice as long to compile
SIZES = {"context": 16, "batch": 8, "accumulate": 2, "eval_windows": 4, "ema": 0.9}
TINY = Preset(MODEL, steps=5, learning_rate=1e-2, warmup_steps=1, eval_every=4, **SIZES)


def train(out: Path, backend: str = "xla", **options: Any) -> None:
    """The command without the report and the sample."""
    PRESETS["tiny"] = TINY
    train_lm.plot_report = train_lm.write_sample = lambda *_: None
    train_lm.main(
        **{"preset": "tiny", "data": [str(Path(__file__).parents[2] / "LICENSE")], "out": out, "backend": backend}
        | options
    )


def watched_steps(make_step: Callable[..., Any], wrap: Callable[[Callable[[], Any], int], Any]) -> Callable[..., Any]:
    """A `make_step` whose step's calls go through `wrap`, with their number from 1."""

    def make(*arguments: Any) -> Any:
        step, calls = make_step(*arguments), itertools.count(1)
        return lambda *given: wrap(lambda: step(*given), next(calls))

    return make


def main(folder: str, coordinator: str = "") -> None:
    """The first process delays its write until later steps have overwritten the state.

    The second one, without `coordinator`, reads it and its own number from SLURM's variables. It leaves the next write
    half written, until it is killed.
    """
    overwritten = threading.Event()

    def hold(event: str, arguments: tuple) -> None:
        if event == "os.mkdir" and str(arguments[0]).endswith("checkpoints/2.orbax-checkpoint-tmp"):
            overwritten.wait(TOO_LONG_S)
        if event == "open" and str(arguments[0]).endswith("4.orbax-checkpoint-tmp/_METADATA"):
            print("writing", flush=True)
            threading.Event().wait(TOO_LONG_S)

    def watch(step: Callable[[], Any], number: int) -> Any:
        result = jax.block_until_ready(step())
        if number == EVERY + 1:
            overwritten.set()
        return result

    if coordinator:
        sys.addaudithook(hold)
    loop.make_step = watched_steps(loop.make_step, watch)
    how = {"coordinator": coordinator, "processes": 2, "process_id": 0} if coordinator else {"distributed": True}
    train(Path(folder), mesh="fsdp=2", save_every=EVERY, **how)


if __name__ == "__main__":
    gc.disable()  # a tenth of its time; it is killed soon
    main(*sys.argv[1:])
