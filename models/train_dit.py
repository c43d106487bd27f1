"""Trains a diffusion transformer on packed images of unequal sizes and draws new ones: `python -m models.train dit`."""

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
from models.dit import DiT, DiTConfig, generate, loss_fn
from models.images import DATA_SETS, Batch, DataSet, Images, endless_batches, every_image_once, unpatchify
from models.loop import BACKENDS, check_option, make_optimizer, run_steps, with_steps
from models.precision import PRECISIONS, Precision, for_this_machine
from models.presets import DIT_PRESETS, DiTPreset
from models.report import History, draw_grid, plot_loss

UNIT = "squared error of the velocity"


class TrainState(NamedTuple):
    """Everything that a step changes. It is donated: the step writes the new state over the old one. `histories` is empty but with delayed scaling."""

    params: nnx.State
    histories: nnx.State
    average: nnx.State
    opt_state: optax.OptState
    step: jax.Array


class Metrics(NamedTuple):
    """Device values of one step; `fill` is the share of the batch's rows that are an image's."""

    loss: jax.Array
    fill: jax.Array


def configure(preset: DiTPreset, data: DataSet, backend: str, precision: Precision) -> DiTConfig:
    """The preset's model for a data set."""
    return DiTConfig(
        preset.layers,
        preset.width,
        preset.heads,
        token=data.patch**2 * data.channels,
        classes=len(data.classes),
        longest=data.longest,
        dtype=precision.dtype,
        recipe=precision.recipe,
        backend=backend,
    )


def init_state(config: DiTConfig, preset: DiTPreset, seed: int) -> tuple[nnx.GraphDef, TrainState]:
    @nnx.jit
    def create():
        return DiT(config, rngs=nnx.Rngs(seed))

    graphdef, params, histories = nnx.split(create(), nnx.Param, AmaxHistory)
    opt_state = jax.jit(make_optimizer(preset).init)(params)
    return graphdef, TrainState(params, histories, jax.tree.map(jnp.copy, params), opt_state, jnp.zeros((), jnp.int32))


def make_step(graphdef: nnx.GraphDef, preset: DiTPreset) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    """The whole training step as one compiled program, whatever sizes the images have: gradient, update, average."""
    optimizer = make_optimizer(preset)

    def objective(params: nnx.State, histories: nnx.State, batch: Batch, key: jax.Array):
        model = nnx.merge(graphdef, params, histories, copy=True)  # the call changes the histories, which jax.grad has not made its own
        return loss_fn(model, batch, key), nnx.state(model, AmaxHistory)

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(key, state.step)
        (loss, histories), grads = jax.value_and_grad(objective, has_aux=True)(state.params, state.histories, batch, key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = state._replace(params=optax.apply_updates(state.params, updates), histories=histories, opt_state=opt_state, step=state.step + 1)
        # Early on a shorter average, or it would still hold the first, random weights.
        keep = jnp.minimum(preset.ema, (1 + state.step) / (10 + state.step))
        average = jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, state.average, new.params)
        fill = (batch.sequence_offsets[-1] - batch.sequence_offsets[0]) / batch.tokens.shape[0]
        return new._replace(average=average), Metrics(loss, fill)

    return jax.jit(step, donate_argnums=0)


def make_evaluate(graphdef: nnx.GraphDef) -> Callable[[nnx.State, nnx.State, Batch, jax.Array], jax.Array]:
    """Mean loss over batches (stacked), each with times and noise that are the same in every evaluation; no label is dropped."""

    @jax.jit
    def evaluate(params: nnx.State, histories: nnx.State, batches: Batch, key: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params, histories)
        model.eval()
        keys = jax.random.split(key, batches.labels.shape[0])
        losses = jax.lax.map(lambda args: loss_fn(model, *args, label_dropout=0.0), (batches, keys))
        rows = (batches.sequence_offsets[:, -1] - batches.sequence_offsets[:, 0]).astype(jnp.float32)
        return jnp.sum(losses * rows) / jnp.sum(rows)

    return evaluate


def stack(batches: list[Batch]) -> Batch:
    return Batch(*(np.stack(parts) for parts in zip(*batches, strict=True)))


def train(preset: DiTPreset, config: DiTConfig, data: DataSet, seed: int, console: Console) -> tuple[DiT, History]:
    """Runs all steps and evaluations; the model that comes back has the averaged weights, and is in evaluation mode."""
    graphdef, state = init_state(config, preset, seed)
    step, evaluate = make_step(graphdef, preset), make_evaluate(graphdef)
    console.print(f"{sum(p.size for p in jax.tree.leaves(state.params)):,} parameters")

    size = (data.patch, preset.tokens, preset.images)
    batches = endless_batches(data.train, *size, seed)
    heldout = jax.device_put(stack([batch for _, batch in every_image_once(data.heldout, *size)]))
    key, heldout_key = jax.random.split(jax.random.key(seed))

    def advance() -> Metrics:
        nonlocal state
        state, metrics = step(state, jax.device_put(next(batches)), key)
        return metrics

    history = run_steps(preset, advance, lambda: evaluate(state.average, state.histories, heldout, heldout_key), preset.tokens, UNIT, console)
    model = nnx.merge(graphdef, state.average, state.histories)
    model.eval()
    return model, history


def sample(model: DiT, preset: DiTPreset, data: DataSet, seed: int) -> list[list[np.ndarray]]:
    """New images, uint8 [height, width, channels]: a row for each of the data set's sample_sizes, a column for each class."""
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, batch, key: generate(nnx.merge(graphdef, state), batch, key, preset.sample_steps, preset.guidance))
    labels = range(len(data.classes))
    wanted = Images(
        [np.zeros((height, width, data.channels), np.uint8) for height, width in data.sample_sizes for _ in labels],
        np.array([label for _ in data.sample_sizes for label in labels], np.int32),
    )
    keys = jax.random.split(jax.random.key(seed))
    drawn = {}
    for number, (chosen, batch) in enumerate(every_image_once(wanted, data.patch, preset.tokens, preset.images)):
        tokens = np.asarray(run(state, batch, jax.random.fold_in(keys[0], number)))
        for s, i in enumerate(chosen):
            start, end = batch.sequence_offsets[s : s + 2]
            drawn[i] = unpatchify(tokens[start:end], batch.grids[s], data.patch)
    return [[drawn[len(labels) * row + label] for label in labels] for row in range(len(data.sample_sizes))]


def main(
    data: Annotated[str, typer.Option(help=f"What to learn from: {', '.join(DATA_SETS)}.")] = "digits",
    preset: Annotated[str, typer.Option(help=f"Size of the model: {', '.join(DIT_PRESETS)}.")] = "demo",
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, instead of the preset's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the pictures. Default: runs/dit-DATA-PRESET.")] = None,
    seed: Annotated[int, typer.Option(help="Of the parameters, the sizes, the batches and the samples.")] = 0,
    backend: Annotated[str, typer.Option(help="Of the AdaLN ops and of matrix multiplications in FP8: auto, pallas or xla.")] = "auto",
    precision: Annotated[str | None, typer.Option(help=f"{', '.join(PRECISIONS)}. Default: bfloat16 on a GPU, else float32.")] = None,
) -> None:
    """Trains a diffusion transformer on images of unequal sizes, packed without padding, and draws new ones."""
    check_option("data", data, DATA_SETS)
    check_option("preset", preset, DIT_PRESETS)
    check_option("backend", backend, BACKENDS)
    precision = for_this_machine() if precision is None else precision
    check_option("precision", precision, PRECISIONS)
    begin = time.perf_counter()
    console = Console(highlight=False, soft_wrap=True)
    chosen = with_steps(DIT_PRESETS[preset], steps)
    out = Path("runs", f"dit-{data}-{preset}") if out is None else out
    out.mkdir(parents=True, exist_ok=True)

    images = DATA_SETS[data](seed)
    config = configure(chosen, images, backend, PRECISIONS[precision])
    console.print(f"{len(images.train.pixels):,} images to train on, {len(images.heldout.pixels):,} held out, {len(images.classes)} classes")
    console.print(f"preset {preset}, {precision} on {jax.devices()[0].device_kind}")

    model, history = train(chosen, config, images, seed, console)
    plot_loss(history, UNIT, out / "loss.png")
    draw_grid(sample(model, chosen, images, seed), images.classes, out / "samples.png")

    few = min(10, chosen.steps)
    first, last = np.mean(history.loss[:few]), np.mean(history.loss[-few:])
    fill = np.mean([metrics.fill for metrics in history.metrics])
    console.print(f"loss of the first and last {few} steps {first:.3f} -> {last:.3f} ({last / first:.0%}), held-out {history.heldout[-1][1]:.3f}")
    console.print(f"{fill:.1%} of the rows were an image's; {time.perf_counter() - begin:.0f} s; pictures in {out}/")
