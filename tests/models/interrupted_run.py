"""A tiny training run for tests/models/test_checkpoints.py, and, as a process of its own, the run that is killed while it writes its second checkpoint."""

import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoints import Checkpoints
from models.decoder import DecoderConfig
from models.presets import Preset
from models.train_lm import Metrics, TrainState, init_state, make_step

EVERY = 2
TOO_LONG_S = 60  # after which a test that went wrong ends
MODEL = DecoderConfig(32, 8, 1, 2, 2, 4, 8, experts=2, top_k=1, tie_embeddings=True, backend="xla")
TINY = Preset(MODEL, context=8, batch=2, steps=6, learning_rate=1e-2, warmup_steps=1, eval_every=6, eval_windows=2)


def start() -> tuple[Any, TrainState]:
    graphdef, state = init_state(TINY, 0)
    data, key = jnp.asarray(np.random.default_rng(0).integers(0, 32, 200), jnp.int32), jax.random.key(1)
    step = make_step(graphdef, TINY)
    return lambda state: step(state, data, key), state


def train(advance, checkpoints: Checkpoints | None, state: TrainState, done: int, steps: int) -> tuple[TrainState, list[Metrics]]:
    """The state after `steps` steps, and the metrics of those that it made."""
    metrics = []
    for now in range(done + 1, steps + 1):
        state, new = advance(state)
        metrics.append(jax.device_get(new))
        if checkpoints is not None:
            checkpoints.save(state, now)
    return state, metrics


def main(folder: Path) -> None:
    """Holds the first write back until later steps have overwritten the state, and the second one, half written, until it is killed."""
    overwritten = threading.Event()

    def hold(event: str, arguments: tuple) -> None:
        if event == "os.mkdir" and str(arguments[0]).endswith("2.orbax-checkpoint-tmp/default.orbax-checkpoint-tmp"):
            overwritten.wait(TOO_LONG_S)
        if event == "open" and str(arguments[0]).endswith("4.orbax-checkpoint-tmp/default.orbax-checkpoint-tmp/_METADATA"):
            print("writing", flush=True)
            threading.Event().wait(TOO_LONG_S)

    sys.addaudithook(hold)
    advance, state = start()
    with Checkpoints(folder, every=EVERY) as checkpoints:
        state, _ = train(advance, checkpoints, state, 0, 3)
        overwritten.set()
        train(advance, checkpoints, state, 3, 4)
        print("saved", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
