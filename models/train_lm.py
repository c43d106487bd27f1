"""Trains a mixture-of-experts language model on the bytes of Python's standard library: `python -m models.train lm`."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from rich.console import Console

from jaxops.nn import AmaxHistory
from models.data import Corpus, bigram_nats, even_windows, random_windows, read_corpus
from models.decoder import Decoder, loss_fn
from models.generate import align, sample
from models.loop import BACKENDS, check_option, make_optimizer, run_steps, with_steps
from models.precision import PRECISIONS, Precision, for_this_machine
from models.presets import PRESETS, Preset
from models.report import History, plot_expert_load, plot_loss

UNIT = "nats a byte"


class TrainState(NamedTuple):
    """Everything that a step changes. It is donated: the step writes the new state over the old one. `histories` is empty but with delayed scaling."""

    params: nnx.State
    histories: nnx.State
    opt_state: optax.OptState
    step: jax.Array


class Metrics(NamedTuple):
    """Device values of one step; reading them is the only wait for the device."""

    loss: jax.Array
    balance: jax.Array
    load: jax.Array


def configure(preset: Preset, steps: int | None, backend: str, precision: Precision) -> Preset:
    """The preset with the number of steps and the precision asked for; on a GPU with cuDNN's attention, which has no float32."""
    attention = "cudnn" if jax.default_backend() == "gpu" and precision.dtype != "float32" else "xla"
    model = dataclasses.replace(preset.model, backend=backend, dtype=precision.dtype, recipe=precision.recipe, attention=attention)
    return with_steps(dataclasses.replace(preset, model=model), steps)


def init_state(preset: Preset, seed: int) -> tuple[nnx.GraphDef, TrainState]:
    @nnx.jit
    def create():
        return Decoder(preset.model, rngs=nnx.Rngs(seed))

    graphdef, params, histories = nnx.split(create(), nnx.Param, AmaxHistory)
    opt_state = jax.jit(make_optimizer(preset).init)(params)
    return graphdef, TrainState(params, histories, opt_state, jnp.zeros((), jnp.int32))


def make_step(graphdef: nnx.GraphDef, preset: Preset) -> Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, Metrics]]:
    """The whole training step as one compiled program: cut a batch from data, gradient, update. Nothing in it waits for the host."""
    optimizer = make_optimizer(preset)

    def objective(params, histories, windows):
        model = nnx.merge(graphdef, params, histories, copy=True)  # the call changes the histories, which jax.grad has not made its own
        loss, routing = loss_fn(model, windows)
        assert routing is not None  # a preset's model has experts
        balance = jnp.mean(routing.aux_loss)
        load = routing.load / jnp.sum(routing.load, axis=1, keepdims=True)
        return loss + preset.balance_weight * balance, (Metrics(loss, balance, load), nnx.state(model, AmaxHistory))

    def step(state: TrainState, data: jax.Array, key: jax.Array) -> tuple[TrainState, Metrics]:
        windows = random_windows(data, jax.random.fold_in(key, state.step), preset.batch, preset.context + 1)
        grads, (metrics, histories) = jax.grad(objective, has_aux=True)(state.params, state.histories, windows)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, histories=histories, opt_state=opt_state, step=state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)


def make_evaluate(graphdef: nnx.GraphDef, preset: Preset) -> Callable[[nnx.State, nnx.State, jax.Array], jax.Array]:
    """Mean loss over windows, a batch at a time."""

    @jax.jit
    def evaluate(params: nnx.State, histories: nnx.State, windows: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params, histories)
        model.eval()
        batches = windows.reshape(-1, min(preset.batch, windows.shape[0]), windows.shape[1])
        return jnp.mean(jax.lax.map(lambda batch: loss_fn(model, batch)[0], batches))

    return evaluate


def train(preset: Preset, corpus: Corpus, seed: int, console: Console) -> tuple[Decoder, History]:
    """Runs all steps and evaluations; the model that comes back is trained, and in evaluation mode."""
    graphdef, state = init_state(preset, seed)
    step, evaluate = make_step(graphdef, preset), make_evaluate(graphdef, preset)
    console.print(f"{sum(p.size for p in jax.tree.leaves(state.params)):,} parameters")

    data, key = jax.device_put(corpus.train), jax.random.key(seed)
    windows = jax.device_put(even_windows(corpus.heldout, preset.eval_windows, preset.context + 1))

    def advance() -> Metrics:
        nonlocal state
        state, metrics = step(state, data, key)
        return metrics

    history = run_steps(preset, advance, lambda: evaluate(state.params, state.histories, windows), preset.batch * preset.context, UNIT, console)
    model = nnx.merge(graphdef, state.params, state.histories)
    model.eval()
    return model, history


def main(
    preset: Annotated[str, typer.Option(help=f"Size of the model: {', '.join(PRESETS)}.")] = "demo",
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, instead of the preset's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the pictures. Default: runs/lm-PRESET.")] = None,
    seed: Annotated[int, typer.Option(help="Of the parameters, the batches and the sample.")] = 0,
    backend: Annotated[str, typer.Option(help="Of the experts' matrix multiplications and of those in FP8: auto, pallas or xla.")] = "auto",
    precision: Annotated[str | None, typer.Option(help=f"{', '.join(PRECISIONS)}. Default: bfloat16 on a GPU, else float32.")] = None,
) -> None:
    """Trains a mixture-of-experts language model on the bytes of the Python standard library's sources."""
    check_option("preset", preset, PRESETS)
    check_option("backend", backend, BACKENDS)
    precision = for_this_machine() if precision is None else precision
    check_option("precision", precision, PRECISIONS)
    begin = time.perf_counter()
    console = Console(highlight=False, soft_wrap=True)
    chosen = configure(PRESETS[preset], steps, backend, PRECISIONS[precision])
    out = Path("runs", f"lm-{preset}") if out is None else out
    out.mkdir(parents=True, exist_ok=True)

    corpus = read_corpus()
    windows = even_windows(corpus.heldout, chosen.eval_windows, chosen.context + 1)
    bigram = bigram_nats(corpus.train, windows)
    console.print(f"{len(corpus.train):,} bytes to train on, {len(corpus.heldout):,} held out; a bigram table needs {bigram:.3f} nats a held-out byte")
    console.print(f"preset {preset}, {precision} on {jax.devices()[0].device_kind}")

    model, history = train(chosen, corpus, seed, console)
    plot_loss(history, UNIT, out / "loss.png", ("bigram table", bigram))
    plot_expert_load(np.stack([metrics.load for metrics in history.metrics]), out / "expert_load.png")

    prompt = corpus.heldout[: chosen.context // 4]  # with what follows, as long as what the model has seen
    (written,) = sample(model, align([prompt.tolist()]), jax.random.key(seed), chosen.context - len(prompt), temperature=0.8)
    console.print("\nHeld-out text, and how the model goes on:")
    console.print(bytes(prompt).decode(errors="replace"), style="dim", markup=False, end="")
    console.print(bytes(written.tolist()).decode(errors="replace"), style="bold", markup=False)
    console.print(f"\nheld-out {history.heldout[-1][1]:.3f} nats a byte (bigram {bigram:.3f}) after {time.perf_counter() - begin:.0f} s; pictures in {out}/")
