"""Trains a diffusion transformer on packed images of unequal sizes and draws new ones: `python -m models.train dit`."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.data.images import (
    DATA_SETS,
    Batch,
    DataSet,
    Images,
    every_image_once,
    files_read,
    image_batches,
    pack,
    read_data,
    stack,
    unpatchify,
)
from models.distributed.mesh import TENSOR, by_device, check_shares, micro_batches, parts_of
from models.distributed.processes import is_first
from models.dit.model import DiT, DiTConfig, generate, loss_fn
from models.training import config, launch, loop
from models.training.config import Options, option
from models.training.loop import Measured, Run, Task
from models.training.presets import DIT_PRESETS, DiTPreset
from models.training.report import History, draw_captioned, plot_report

UNIT = "squared error of the velocity"
DRAWN = 10  # classes, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class DitOptions(Options):
    data: str | None = option(
        None, f"{', '.join(DATA_SETS)}, or a folder of images, with a sub-folder for each class. Default: digits."
    )


def choose(options: DitOptions) -> DiTPreset:
    """As of `models.training.config.choose`."""
    return config.choose(options, DIT_PRESETS)


def configure(preset: DiTPreset, data: DataSet, mesh: Mesh | None = None) -> DiTConfig:
    """The preset's model for a data set."""
    check_shares({"tokens": preset.tokens, "images": preset.images}, ("tokens",), preset.accumulate, mesh)
    budget = preset.tokens // micro_batches(preset.accumulate, mesh)
    if budget < data.longest:
        raise ValueError(
            f"a micro-batch has {budget} tokens, and an image may have {data.longest}; change tokens, accumulate or "
            "longest."
        )
    sizes = sizes_of(preset, token=data.patch**2 * data.channels, classes=len(data.classes), longest=data.longest)
    sizes.check_tensor(1 if mesh is None else mesh.shape[TENSOR])
    return sizes


def sizes_of(preset: DiTPreset, *, token: int, classes: int, longest: int) -> DiTConfig:
    """The preset's model, for data of these sizes."""
    shared = {field.name for field in dataclasses.fields(DiTConfig)} & vars(preset).keys()
    given: dict[str, Any] = {"token": token, "classes": classes, "longest": longest}
    return DiTConfig(**{name: getattr(preset, name) for name in shared} | given)


@dataclasses.dataclass(frozen=True)
class DitTask(Task):
    """Velocities of images; a tenth of them has no label in training."""

    preset: DiTPreset
    sizes: DiTConfig
    own_batches = True

    def model(self, rngs: nnx.Rngs, *, sharded: bool = False) -> DiT:
        return DiT(self.sizes, rngs=rngs)

    def objective(self, model: DiT, batch: Batch, key: jax.Array) -> tuple[jax.Array, Measured]:
        loss = loss_fn(model, batch, key, label_dropout=0.1)
        return loss, Measured(loss)

    def heldout_objective(self, model: DiT, batch: Batch, key: jax.Array) -> tuple[jax.Array, Measured]:
        loss = loss_fn(model, batch, key, label_dropout=0.0)
        return loss, Measured(loss)


def make_batches(preset: DiTPreset, data: DataSet, mesh: Mesh | None = None) -> Callable[[int], Batch]:
    parts = micro_batches(preset.accumulate, mesh)
    batches = image_batches(data.train, data.patch, preset.tokens, preset.images, parts, preset.seed)
    return lambda step: by_device(batches(step), mesh)


def heldout_batches(preset: DiTPreset, data: DataSet, mesh: Mesh | None) -> Batch:
    """All held-out images; the last devices may get empty batches."""
    parts = micro_batches(preset.accumulate, mesh)
    micro = (data.patch, preset.tokens // parts, preset.images // parts)
    batches = [batch for _, batch in every_image_once(data.heldout, *micro)]
    batches += -len(batches) % parts_of(mesh) * [pack(data.heldout, [], *micro)]
    return by_device(stack(batches), mesh)


def train(preset: DiTPreset, sizes: DiTConfig, data: DataSet, run: Run) -> tuple[DiT, History]:
    """As of `models.training.loop.train`."""
    batches, heldout = make_batches(preset, data, run.mesh), heldout_batches(preset, data, run.mesh)
    return loop.train(DitTask(preset, sizes), batches, heldout, UNIT, run, lambda model: lowered(model, preset, data))


def wanted(preset: DiTPreset, data: DataSet) -> list[tuple[list[int], Batch]]:
    """The batches of what `sample` draws, and which images they have."""
    labels = range(min(len(data.classes), DRAWN))
    images = Images(
        [np.zeros((height, width, data.channels), np.uint8) for height, width in data.sample_sizes for _ in labels],
        np.array([label for _ in data.sample_sizes for label in labels], np.int32),
    )
    return list(every_image_once(images, data.patch, preset.tokens, preset.images))


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _drawn(
    graphdef: nnx.GraphDef, state: nnx.State, batch: Batch, seed: int, number: int, steps: int, guidance: float
) -> jax.Array:
    """The tokens of a batch, by its number."""
    key = jax.random.fold_in(jax.random.split(jax.random.key(seed))[0], number)
    return generate(nnx.merge(graphdef, state), batch, key, steps, guidance)


def lowered(model: DiT, preset: DiTPreset, data: DataSet) -> Iterator[jax.stages.Lowered]:
    """The program of `sample`, for a model of `jax.ShapeDtypeStruct`s."""
    _, batch = wanted(preset, data)[0]
    yield _drawn.lower(*nnx.split(model), batch, preset.seed, 0, preset.sample_steps, preset.guidance)


def sample(model: DiT, preset: DiTPreset, data: DataSet, seed: int) -> list[list[np.ndarray]]:
    """New images, uint8 [height, width, channels]: a row for each of sample_sizes, a column for each class."""
    (graphdef, state), drawn = nnx.split(model), {}
    for number, (chosen, batch) in enumerate(wanted(preset, data)):
        tokens = np.asarray(_drawn(graphdef, state, batch, seed, number, preset.sample_steps, preset.guidance))
        for s, i in enumerate(chosen):
            start, end = batch.sequence_offsets[s : s + 2]
            drawn[i] = unpatchify(tokens[start:end], batch.grids[s], data.patch)
    columns = min(len(data.classes), DRAWN)
    return [[drawn[columns * row + i] for i in range(columns)] for row in range(len(data.sample_sizes))]


def run(options: DitOptions) -> None:
    """Trains a diffusion transformer on images of unequal sizes, packed without padding, and draws new ones."""
    begin = time.perf_counter()
    launch.start_processes(options)
    with config.errors_of_options():
        preset = choose(options)
        mesh = launch.choose_mesh(options, preset.backend)
        images = read_data(preset.data, preset.seed, preset.patch, preset.longest, preset.background)
        sizes = configure(preset, images, mesh)
        DitTask(preset, sizes).check_frozen()
        out = Path("runs", f"dit-{Path(preset.data).name}-{options.preset}")
        run = launch.begin(options, preset, mesh, out, files_read(preset.data))
    with launch.ended_in_one_line(run):
        _train_and_report(options, preset, sizes, images, run, begin)


def _train_and_report(
    options: DitOptions, preset: DiTPreset, sizes: DiTConfig, images: DataSet, run: Run, begin: float
) -> None:
    train_number, heldout_number = len(images.train.pixels), len(images.heldout.pixels)
    run.say(f"{train_number:,} images to train on, {heldout_number:,} held out, {len(images.classes)} classes")
    launch.print_model(options, preset, run, images.remark)
    model, history = train(preset, sizes, images, run)
    if not is_first():
        return
    plot_report(history, UNIT, run.out / "report.png")
    drawn, names = sample(model, preset, images, preset.seed), images.classes[:DRAWN]
    texts = [*names, *((len(drawn) - 1) * len(names) * [""])]
    section = ("drawn for each class in several sizes", [image for row in drawn for image in row], texts)
    draw_captioned([section], run.out / "samples.png", columns=len(names))

    few, heldout = min(10, preset.steps), history.last_heldout
    first, last = np.mean(history.loss[:few]), np.mean(history.loss[-few:])
    change = f"{first:.3f} -> {last:.3f} ({last / first:.0%})"
    run.say(f"loss of the first and last {few} steps {change}, held-out {heldout:.3f}")
    run.say(f"{history.fill:.1%} of the rows were an image's; {time.perf_counter() - begin:.0f} s")
    run.say(f"{run.out}/ has report.png, samples.png, metrics.jsonl, config.yaml, and tensorboard")


main = config.command(DitOptions, run)
