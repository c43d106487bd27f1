"""Trains a diffusion transformer on packed images of unequal sizes and draws new ones: `python -m models.train dit`."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer
from flax import nnx
from rich.console import Console

from jaxops.nn import AmaxHistory
from models import config, loop
from models.config import Options, check_option
from models.dit import DiT, DiTConfig, generate, loss_fn
from models.images import DATA_SETS, Batch, DataSet, Images, every_image_once, image_batches, read_data, stack, unpatchify
from models.loop import Measured, Training, TrainState, run_steps, with_steps
from models.precision import PRECISIONS, Precision, for_this_machine
from models.presets import DIT_PRESETS, DiTPreset
from models.report import History, draw_grid, plot_report

UNIT = "squared error of the velocity"
DRAWN = 10  # classes, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class DitOptions(Options):
    data: Annotated[
        str | None, typer.Option(help=f"{', '.join(DATA_SETS)}, or a folder of images, with a folder for each class if there are any. Default: digits.")
    ] = None


def with_precision(preset: DiTPreset, precision: Precision) -> DiTPreset:
    """And on a GPU with cuDNN's attention, which has no float32."""
    attention = "cudnn" if jax.default_backend() == "gpu" and precision.dtype != "float32" else preset.attention
    return dataclasses.replace(preset, dtype=precision.dtype, recipe=precision.recipe, attention=attention)


def choose(options: DitOptions) -> DiTPreset:
    """The preset, over it this machine's precision, over that what the options say.

    Raises:
      ValueError: a setting that there is not, or that is not possible; see `models.config`.
    """
    check_option("preset", options.preset, DIT_PRESETS)
    given = config.given_by(options, {"data": options.data}, nested=False)
    precision = Precision(given.get("dtype", PRECISIONS[for_this_machine()].dtype))
    chosen = config.resolve(with_precision(DIT_PRESETS[options.preset], precision), given)
    return chosen if "warmup_steps" in given else with_steps(chosen, None)


def configure(preset: DiTPreset, data: DataSet) -> DiTConfig:
    """The preset's model for a data set.

    Raises:
      ValueError: a micro-batch cannot hold the largest image.
    """
    budget = preset.tokens // preset.accumulate
    if budget < data.longest:
        raise ValueError(f"a micro-batch has {budget} tokens, and an image may have {data.longest}; change tokens, accumulate or longest.")
    return DiTConfig(
        preset.layers,
        preset.width,
        preset.heads,
        token=data.patch**2 * data.channels,
        classes=len(data.classes),
        longest=data.longest,
        dtype=preset.dtype,
        recipe=preset.recipe,
        attention=preset.attention,
        crowd=data.crowd,
        backend=preset.backend,
    )


def init_state(sizes: DiTConfig, preset: DiTPreset, seed: int) -> tuple[nnx.GraphDef, TrainState]:
    model = nnx.jit(lambda: DiT(sizes, rngs=nnx.Rngs(seed)))()
    graphdef, params, histories = nnx.split(model, nnx.Param, AmaxHistory)
    return graphdef, loop.init_state(preset, params, histories)


def objective(model: DiT, batch: Batch, key: jax.Array, label_dropout: float = 0.1) -> tuple[jax.Array, Measured]:
    loss = loss_fn(model, batch, key, label_dropout)
    return loss, Measured(loss)


def make_step(graphdef: nnx.GraphDef, preset: DiTPreset) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, loop.Metrics]]:
    """One compiled program, whatever sizes the images have."""
    return loop.make_step(graphdef, preset, objective)


def make_evaluate(graphdef: nnx.GraphDef) -> Callable[[nnx.State, nnx.State, Batch, jax.Array], jax.Array]:
    """No label is dropped."""
    return loop.make_evaluate(graphdef, lambda model, batch, key: objective(model, batch, key, label_dropout=0.0))


def make_batches(preset: DiTPreset, data: DataSet) -> Callable[[int], Batch]:
    return image_batches(data.train, data.patch, preset.tokens, preset.images, preset.accumulate, preset.seed)


def train(preset: DiTPreset, sizes: DiTConfig, data: DataSet, out: Path, console: Console) -> tuple[DiT, History]:
    """Runs all steps and evaluations; the model that comes back has the averaged weights, and is in evaluation mode."""
    graphdef, state = init_state(sizes, preset, preset.seed)
    console.print(f"{sum(p.size for p in jax.tree.leaves(state.params)):,} parameters")
    micro = (data.patch, preset.tokens // preset.accumulate, preset.images // preset.accumulate)
    heldout = loop.place(stack([batch for _, batch in every_image_once(data.heldout, *micro)]))
    key, heldout_key = jax.random.split(jax.random.key(preset.seed))
    evaluate = make_evaluate(graphdef)
    training = Training(
        preset,
        make_step(graphdef, preset),
        lambda state: evaluate(loop.kept(state), state.histories, heldout, heldout_key),
        make_batches(preset, data),
        key,
        UNIT,
    )
    state, history = run_steps(training, state, out, console)
    model = nnx.merge(graphdef, loop.kept(state), state.histories)
    model.eval()
    return model, history


def sample(model: DiT, preset: DiTPreset, data: DataSet, seed: int) -> list[list[np.ndarray]]:
    """New images, uint8 [height, width, channels]: a row for each of the data set's sample_sizes, a column for each class, of many for the first."""
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, batch, key: generate(nnx.merge(graphdef, state), batch, key, preset.sample_steps, preset.guidance))
    labels = range(min(len(data.classes), DRAWN))
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


def run(options: DitOptions) -> None:
    """Trains a diffusion transformer on images of unequal sizes, packed without padding, and draws new ones."""
    begin, console = time.perf_counter(), Console(highlight=False, soft_wrap=True)
    with config.errors_of_options():
        preset = choose(options)
        images = read_data(preset.data, preset.seed, preset.patch, preset.longest)
        sizes = configure(preset, images)
    out = Path("runs", f"dit-{Path(preset.data).name}-{options.preset}") if options.out is None else options.out
    out.mkdir(parents=True, exist_ok=True)
    config.write(preset, out / "config.yaml")
    console.print(f"{len(images.train.pixels):,} images to train on, {len(images.heldout.pixels):,} held out, {len(images.classes)} classes")
    console.print(f"preset {options.preset}, {preset.dtype}, recipe {preset.recipe}, on {jax.devices()[0].device_kind}")

    model, history = train(preset, sizes, images, out, console)
    plot_report(history, UNIT, out / "report.png")
    draw_grid(sample(model, preset, images, preset.seed), images.classes[:DRAWN], out / "samples.png")

    few = min(10, preset.steps)
    first, last = np.mean(history.loss[:few]), np.mean(history.loss[-few:])
    fill = np.mean([row["fill"] for row in history.rows])
    console.print(f"loss of the first and last {few} steps {first:.3f} -> {last:.3f} ({last / first:.0%}), held-out {history.heldout[-1][1]:.3f}")
    console.print(f"{fill:.1%} of the rows were an image's; {time.perf_counter() - begin:.0f} s")
    console.print(f"{out}/ has report.png, samples.png, metrics.jsonl, config.yaml, and tensorboard")


main = config.command(DitOptions, run)
