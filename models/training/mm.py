"""Trains one transformer on text and images, which draws and captions: `python -m models.train mm`."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.data.images import stack
from models.data.pairs import DATA_SETS, PairData, Pairs, files_read, read_pairs
from models.data.tokenizer import Bytes, HuggingFace, Tokenizer
from models.distributed.mesh import TENSOR, by_device, check_shares, micro_batches, parts_of
from models.distributed.processes import is_first
from models.multimodal.interleaved import (
    Batch,
    Document,
    Room,
    Tokens,
    captioned,
    document_batches,
    every_document_once,
    illustrated,
    in_batches,
    lay_out,
)
from models.multimodal.loss import loss_fn
from models.multimodal.model import Multimodal
from models.multimodal.show import lowered, show
from models.training import config, launch, loop
from models.training.config import Options, option
from models.training.loop import Measured, Run, Task
from models.training.presets import MULTIMODAL_PRESETS, MultimodalPreset
from models.training.report import History, plot_report

UNIT = "nats and squared errors"
SHARED = ("rows", "predictions", "documents")  # of a step's room, by its micro-batches
Pair = tuple[np.ndarray, list[np.ndarray]]  # an image and its captions' tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class MmOptions(Options):
    data: str | None = option(
        None,
        f"{', '.join(DATA_SETS)}, a folder of images with a .txt each, or a .jsonl file of image and text. "
        "Default: digits.",
    )
    tokenizer: str | None = option(None, "A tokenizer.json. Default: tokens are bytes.")


def choose(options: MmOptions) -> MultimodalPreset:
    """As of `models.training.config.choose`."""
    return config.choose(options, MULTIMODAL_PRESETS)


def choose_tokenizer(preset: MultimodalPreset) -> tuple[Tokenizer, Tokens]:
    """The tokenizer, and the tokens beside those of text, which are numbered after them."""
    tokenizer = Bytes() if preset.tokenizer is None else HuggingFace(Path(preset.tokenizer))
    if tokenizer.end is None:
        raise ValueError(f"{preset.tokenizer} has no token that ends a document, such as <|endoftext|>.")
    return tokenizer, Tokens(tokenizer.vocab, tokenizer.vocab + 1, tokenizer.end)


class Material(NamedTuple):
    """Pairs with captions as tokens."""

    train: list[Pair]
    heldout: list[Pair]
    tokenizer: Tokenizer
    tokens: Tokens  # beside those of captions
    room: Room  # of a whole step's batch


def prepare(preset: MultimodalPreset, data: PairData) -> tuple[MultimodalPreset, Material]:
    """The data as tokens, and the preset with the model's vocab and patch_values."""
    tokenizer, tokens = choose_tokenizer(preset)
    values = data.patch**2 * data.channels
    model = dataclasses.replace(preset.model, vocab=max(preset.model.vocab, tokenizer.vocab + 2), patch_values=values)
    room = Room(preset.rows, preset.predictions, preset.documents, data.patch, data.channels)
    return dataclasses.replace(preset, model=model), Material(
        encode(data.train, tokenizer), encode(data.heldout, tokenizer), tokenizer, tokens, room
    )


def encode(pairs: Pairs, tokenizer: Tokenizer) -> list[Pair]:
    different = sorted({caption for captions in pairs.captions for caption in captions})
    tokens = dict(zip(different, tokenizer.encode_all([caption.encode() for caption in different]), strict=True))
    return [
        (pixels, [tokens[caption].astype(np.int32) for caption in captions])
        for pixels, captions in zip(pairs.pixels, pairs.captions, strict=True)
    ]


def share_of(room: Room, parts: int) -> Room:
    """A micro-batch's, of `parts` in a step."""
    return room._replace(**{name: getattr(room, name) // parts for name in SHARED})


def train_documents(
    preset: MultimodalPreset, pairs: Sequence[Pair], tokens: Tokens, rng: np.random.Generator
) -> list[Document]:
    """A document of each pair, with one of its captions, in a random order of caption and image."""
    found = []
    for (pixels, captions), (order, drop, choice) in zip(pairs, rng.random((len(pairs), 3)), strict=True):
        caption = captions[int(choice * len(captions))]
        if order >= preset.illustrated:
            found.append(captioned(caption, pixels, tokens))
        else:
            found.append(illustrated(caption[: 0 if drop < preset.captionless else None], pixels, tokens))
    return found


def heldout_documents(preset: MultimodalPreset, material: Material) -> list[Document]:
    """Both orders of each held-out pair, with the same captions in every evaluation."""
    rng, found = np.random.default_rng(preset.seed), []
    for pixels, captions in material.heldout:
        caption = captions[rng.integers(len(captions))]
        found += [make(caption, pixels, material.tokens) for make in (illustrated, captioned)]
    return found


def check_fits(preset: MultimodalPreset, material: Material, mesh: Mesh | None) -> None:
    """Checks whether a micro-batch can be split evenly over the devices, and holds the largest document."""
    preset.model.check_tensor(1 if mesh is None else mesh.shape[TENSOR])
    step = material.room
    check_shares({name: getattr(step, name) for name in SHARED}, SHARED[:2], preset.accumulate, mesh)
    room = share_of(step, micro_batches(preset.accumulate, mesh))
    for pixels, captions in (*material.train, *material.heldout):
        in_batches([[captioned(max(captions, key=len), pixels, material.tokens)]], [], room)


@dataclasses.dataclass(frozen=True)
class MmTask(Task):
    """Next tokens and velocities, and experts balanced in each modality. Held-out images that are read are clean."""

    preset: MultimodalPreset
    own_batches = True

    def model(self, rngs: nnx.Rngs, *, sharded: bool = False) -> Multimodal:
        return Multimodal(self.preset.model, sharded=sharded, rngs=rngs)

    def objective(
        self, model: Multimodal, batch: Batch, key: jax.Array, reading_noise: float | None = None
    ) -> tuple[jax.Array, Measured]:
        preset = self.preset
        noise = preset.reading_noise if reading_noise is None else reading_noise
        weights = {"image_weight": preset.image_weight, "time_shift": preset.time_shift}
        loss, routed = loss_fn(model, batch, key, reading_noise=noise, **weights)
        balance = jnp.mean(routed.aux_loss)
        return loss + preset.balance_weight * balance, Measured(loss, balance, shares(preset, routed.load))

    def heldout_objective(self, model: Multimodal, batch: Batch, key: jax.Array) -> tuple[jax.Array, Measured]:
        return self.objective(model, batch, key, reading_noise=0.0)


def shares(preset: MultimodalPreset, load: jax.Array) -> jax.Array:
    """Of each expert in its own modality [layers, experts], so that for all of them 1 / experts is even."""
    counts = (preset.model.text_experts, preset.model.image_experts)
    of_modality = [
        part / jnp.maximum(jnp.sum(part, axis=1, keepdims=True), 1) * count / sum(counts)
        for part, count in zip(jnp.split(load, counts[:1], axis=1), counts, strict=True)
    ]
    return jnp.concatenate(of_modality, axis=1)


def make_batches(preset: MultimodalPreset, material: Material, mesh: Mesh | None = None) -> Callable[[int], Batch]:
    parts = micro_batches(preset.accumulate, mesh)
    make = functools.partial(train_documents, preset, material.train, material.tokens)
    batches = document_batches(make, share_of(material.room, parts), parts, preset.seed)
    return lambda step: by_device(batches(step), mesh)


def heldout_batches(preset: MultimodalPreset, material: Material, mesh: Mesh | None) -> Batch:
    """All held-out documents; the last devices may get empty batches."""
    room = share_of(material.room, micro_batches(preset.accumulate, mesh))
    batches = [batch for _, batch in every_document_once(heldout_documents(preset, material), room)]
    batches += -len(batches) % parts_of(mesh) * [lay_out([], room)]
    return by_device(stack(batches), mesh)


def train(preset: MultimodalPreset, material: Material, run: Run) -> tuple[Multimodal, History]:
    """As of `models.training.loop.train`."""
    batches, heldout = make_batches(preset, material, run.mesh), heldout_batches(preset, material, run.mesh)
    sampler = lambda model: lowered(model, preset, material)
    return loop.train(MmTask(preset), batches, heldout, UNIT, run, sampler)


def run(options: MmOptions) -> None:
    """Trains one transformer on images and captions, packed without padding; then it draws and captions."""
    begin = time.perf_counter()
    launch.start_processes(options)
    with config.errors_of_options():
        preset = choose(options)
        mesh = launch.choose_mesh(options, preset.model.backend)
        data = read_pairs(preset.data, preset.patch, preset.longest, preset.background)
        preset, material = prepare(preset, data)
        check_fits(preset, material, mesh)
        MmTask(preset).check_frozen()
        files = files_read(preset.data)
        if preset.tokenizer is not None:
            files[preset.tokenizer] = Path(preset.tokenizer)
        run = launch.begin(options, preset, mesh, Path("runs", f"mm-{Path(preset.data).stem}-{options.preset}"), files)
    with launch.ended_in_one_line(run):
        _train_and_report(options, preset, data, material, run, begin)


def _train_and_report(
    options: MmOptions, preset: MultimodalPreset, data: PairData, material: Material, run: Run, begin: float
) -> None:
    run.say(f"{len(material.train):,} images with captions to train on, {len(material.heldout):,} held out")
    launch.print_model(options, preset.model, run, data.remark)
    trained, history = train(preset, material, run)
    if not is_first():
        return
    run.say(f"held-out {history.last_heldout:.3f} {UNIT} after {time.perf_counter() - begin:.0f} s")
    run.say(f"{history.fill:.1%} of the rows had a loss")
    plot_report(history, UNIT, run.out / "report.png")
    show(preset, trained, data, material, run)
    files = "samples.png, report.png, metrics.jsonl, config.yaml, and tensorboard"
    run.say(f"{time.perf_counter() - begin:.0f} s; {run.out}/ has {files}")


main = config.command(MmOptions, run)
