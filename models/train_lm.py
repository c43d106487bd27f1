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

from models.data import Corpus, bigram_nats, even_windows, random_windows, read_corpus
from models.loop import BACKENDS, check_option, make_optimizer, run_steps, with_steps
from models.moe_lm import MoELM, generate, loss_fn
from models.presets import PRESETS, Preset
from models.report import History, plot_expert_load, plot_loss

UNIT = "nats a byte"


class TrainState(NamedTuple):
    """Everything that a step changes. It is donated: the step writes the new state over the old one."""

    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array


class Metrics(NamedTuple):
    """Device values of one step; reading them is the only wait for the device."""

    loss: jax.Array
    balance: jax.Array
    load: jax.Array


def for_this_machine(preset: Preset, steps: int | None, backend: str) -> Preset:
    """The preset with the number of steps asked for, in bfloat16 and with cuDNN's attention on a GPU."""
    model = dataclasses.replace(preset.model, backend=backend)
    if jax.default_backend() == "gpu":
        model = dataclasses.replace(model, dtype="bfloat16", attention="cudnn")
    return with_steps(dataclasses.replace(preset, model=model), steps)


def init_state(preset: Preset, seed: int) -> tuple[nnx.GraphDef, TrainState]:
    @nnx.jit
    def create():
        return MoELM(preset.model, rngs=nnx.Rngs(seed))

    graphdef, params = nnx.split(create())
    opt_state = jax.jit(make_optimizer(preset).init)(params)
    return graphdef, TrainState(params, opt_state, jnp.zeros((), jnp.int32))


def make_step(graphdef: nnx.GraphDef, preset: Preset) -> Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, Metrics]]:
    """The whole training step as one compiled program: cut a batch from data, gradient, update. Nothing in it waits for the host."""
    optimizer = make_optimizer(preset)

    def objective(params, windows):
        loss, routing = loss_fn(nnx.merge(graphdef, params), windows)
        balance = jnp.mean(routing.balance)
        return loss + preset.balance_weight * balance, Metrics(loss, balance, routing.load)

    def step(state: TrainState, data: jax.Array, key: jax.Array) -> tuple[TrainState, Metrics]:
        windows = random_windows(data, jax.random.fold_in(key, state.step), preset.batch, preset.model.context + 1)
        grads, metrics = jax.grad(objective, has_aux=True)(state.params, windows)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return state._replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state, step=state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)


def make_evaluate(graphdef: nnx.GraphDef, preset: Preset) -> Callable[[nnx.State, jax.Array], jax.Array]:
    """Mean loss over windows, a batch at a time."""

    @jax.jit
    def evaluate(params: nnx.State, windows: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        batches = windows.reshape(-1, min(preset.batch, windows.shape[0]), windows.shape[1])
        return jnp.mean(jax.lax.map(lambda batch: loss_fn(model, batch)[0], batches))

    return evaluate


def train(preset: Preset, corpus: Corpus, seed: int, console: Console) -> tuple[MoELM, History]:
    """Runs all steps and evaluations; the model that comes back is trained."""
    graphdef, state = init_state(preset, seed)
    step, evaluate = make_step(graphdef, preset), make_evaluate(graphdef, preset)
    console.print(f"{sum(p.size for p in jax.tree.leaves(state.params)):,} parameters")

    data, key = jax.device_put(corpus.train), jax.random.key(seed)
    windows = jax.device_put(even_windows(corpus.heldout, preset.eval_windows, preset.model.context + 1))

    def advance() -> Metrics:
        nonlocal state
        state, metrics = step(state, data, key)
        return metrics

    history = run_steps(preset, advance, lambda: evaluate(state.params, windows), preset.batch * preset.model.context, UNIT, console)
    return nnx.merge(graphdef, state.params), history


def sample(model: MoELM, prompt: np.ndarray, seed: int, length: int = 300) -> str:
    """What the model writes after the prompt."""
    graphdef, params = nnx.split(model)
    run = jax.jit(lambda params, prompt, key: generate(nnx.merge(graphdef, params), prompt, key, length))
    return bytes(np.asarray(run(params, prompt, jax.random.key(seed)))).decode(errors="replace")


def main(
    preset: Annotated[str, typer.Option(help=f"Size of the model: {', '.join(PRESETS)}.")] = "demo",
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, instead of the preset's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the pictures. Default: runs/lm-PRESET.")] = None,
    seed: Annotated[int, typer.Option(help="Of the parameters, the batches and the sample.")] = 0,
    backend: Annotated[str, typer.Option(help="Of the grouped matrix multiplications: auto, pallas or xla.")] = "auto",
) -> None:
    """Trains a mixture-of-experts language model on the bytes of the Python standard library's sources."""
    check_option("preset", preset, PRESETS)
    check_option("backend", backend, BACKENDS)
    begin = time.perf_counter()
    console = Console(highlight=False, soft_wrap=True)
    chosen = for_this_machine(PRESETS[preset], steps, backend)
    out = Path("runs", f"lm-{preset}") if out is None else out
    out.mkdir(parents=True, exist_ok=True)

    corpus = read_corpus()
    windows = even_windows(corpus.heldout, chosen.eval_windows, chosen.model.context + 1)
    bigram = bigram_nats(corpus.train, windows)
    console.print(f"{len(corpus.train):,} bytes to train on, {len(corpus.heldout):,} held out; a bigram table needs {bigram:.3f} nats a held-out byte")
    console.print(f"preset {preset}, {chosen.model.dtype} on {jax.devices()[0].device_kind}")

    model, history = train(chosen, corpus, seed, console)
    plot_loss(history, UNIT, out / "loss.png", ("bigram table", bigram))
    plot_expert_load(np.stack([metrics.load for metrics in history.metrics]), out / "expert_load.png")

    prompt = corpus.heldout[: chosen.model.context]
    written = sample(model, prompt, seed)
    console.print("\nHeld-out text, and how the model goes on:")
    console.print(bytes(prompt).decode(errors="replace"), style="dim", markup=False, end="")
    console.print(written, style="bold", markup=False)
    console.print(f"\nheld-out {history.heldout[-1][1]:.3f} nats a byte (bigram {bigram:.3f}) after {time.perf_counter() - begin:.0f} s; pictures in {out}/")
