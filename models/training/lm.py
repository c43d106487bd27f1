"""Trains a decoder on text, by default on the bytes of Python's standard library: `python -m models.train lm`."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from models import hf
from models.data.packing import Batch, Documents, Rows, even_rows, one_a_row, overall_fill, pack, row_batches
from models.data.text import Corpus, bigram_nats, files_read
from models.data.tokenizer import Bytes, HuggingFace, Tokenizer
from models.decoder import Decoder, DecoderConfig
from models.decoder.loss import loss_fn
from models.distributed.mesh import TENSOR, create_sharded, parts_of, rows_of_process, shard_state
from models.distributed.processes import is_first
from models.distributed.tensor_parallel import check_rows
from models.generate.sampling import Sampling
from models.generate.slots import generate, lowered
from models.generate.streaming import TextStream
from models.hf.config import OF_A_RUN, fitting, read_config
from models.training import config, launch, loop
from models.training.config import Options, option
from models.training.lm_data import CHAT_FILES, checkpoint_folder, choose_tokenizer, read_corpus, tokenizer_files
from models.training.loop import Measured, Run, Task, TrainState
from models.training.presets import PRESETS, Preset
from models.training.report import History, plot_report
from models.training.terminal import lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmOptions(Options):
    data: list[str] | None = option(
        None,
        "Text file, or folder of .txt, .md, .py, .jsonl files of texts or conversations; repeatable. "
        "Default: Python's standard library.",
    )
    raw_bytes: bool = option(False, "Take files of data that are no text as they are, byte by byte.")
    tokenizer: str | None = option(None, "A tokenizer.json. Default: tokens are bytes.")
    init_from: str | None = option(None, "Folder of a Hugging Face checkpoint to start from, with its tokenizer.json.")
    ignore_config: list[str] | None = option(None, "Unknown key of its config.json to go on without.", metavar="KEY")
    no_pack: bool = option(False, "One document a row, in rows of few lengths, instead of rows full of documents.")


def with_attention(preset: Preset) -> Preset:
    """The preset with this machine's attention."""
    model = preset.model
    gpu = jax.default_backend() == "gpu" and model.dtype != "float32"  # whose kernels are for half precision
    kernels = gpu and model.plain_attention and model.window is None
    return config.with_model(preset, attention="auto" if kernels else "xla")


def choose(options: LmOptions) -> Preset:
    """The preset, this machine's choices, and the options, each over the one before.

    Raises:
      ValueError: an unknown or impossible setting; see `models.training.config`.
    """
    given, stored = config.given_by(options, PRESETS), None
    start = PRESETS[options.preset]
    if isinstance(given.get("init_from"), str):
        ignored = given.get("ignore_config")
        stored = read_config(given["init_from"], ignore_config=ignored if isinstance(ignored, list) else ())[1]
        start = dataclasses.replace(start, model=stored)
    chosen = config.finish(with_attention(config.with_dtype(start, given)), given)
    if chosen.model.attention == "cudnn" and jax.default_backend() != "gpu":
        raise ValueError("model.attention is 'cudnn', which needs a GPU; write xla.")
    if stored is not None:
        _check_sizes(chosen.model, stored)
    return chosen


def _check_sizes(given: DecoderConfig, stored: DecoderConfig) -> None:
    sizes = [field.name for field in dataclasses.fields(stored) if field.name not in OF_A_RUN]
    if wrong := [name for name in sizes if getattr(given, name) != getattr(stored, name)]:
        each = ((name, getattr(given, name), getattr(stored, name)) for name in wrong)
        differ = ", ".join(f"model.{name} is {ours}, the checkpoint's is {theirs}" for name, ours, theirs in each)
        raise ValueError(f"{differ}: with init_from leave them out.")


def with_date(preset: Preset, options: LmOptions, default: Path) -> Preset:
    """The preset with the time that chat templates see: of the settings, or when the run began."""
    return preset if preset.date is not None else dataclasses.replace(preset, date=launch.begun(options, default))


@dataclasses.dataclass(frozen=True)
class LmTask(Task):
    """Next tokens, and balanced experts."""

    preset: Preset

    def model(self, rngs: nnx.Rngs, *, sharded: bool = False) -> Decoder:
        return Decoder(self.preset.model, sharded=sharded, rngs=rngs)

    def objective(
        self, model: Decoder, batch: Batch, key: jax.Array, packed: bool = False
    ) -> tuple[jax.Array, Measured]:
        loss, routed = loss_fn(model, batch, packed or self.preset.pack)
        if routed is None:
            return loss, Measured(loss)
        balance = jnp.mean(routed.aux_loss)
        load = routed.load / jnp.maximum(jnp.sum(routed.load, axis=1, keepdims=True), 1)
        return loss + self.preset.balance_weight * balance, Measured(loss, balance, load)

    def heldout_objective(self, model: Decoder, batch: Batch, key: jax.Array) -> tuple[jax.Array, Measured]:
        """Of packed rows, for every way of training: documents do not attend to each other."""
        return self.objective(model, batch, key, packed=True)

    def start(self, mesh: Mesh | None) -> tuple[nnx.GraphDef, TrainState, Callable[[], TrainState]]:
        """A checkpoint's parameters are split over the mesh as they are read."""
        preset = self.preset
        if preset.init_from is None:
            return super().start(mesh)
        with config.errors_of_options():
            of_a_run = {name: getattr(preset.model, name) for name in OF_A_RUN}
            model = hf.load(preset.init_from, mesh=mesh, ignore_config=preset.ignore_config, **of_a_run)[1]
        graphdef, params, others = nnx.split(model, nnx.Param, ...)
        # A loaded model has only the shapes of its histories.
        zeros = lambda h: jnp.zeros(h.shape, h.dtype) if isinstance(h, jax.ShapeDtypeStruct) else h
        others = shard_state(jax.tree.map(zeros, others), mesh)
        begin = lambda params, others: (graphdef, loop.init_state(preset, params, others))
        return create_sharded(begin, mesh, params, others)


def check_fits(preset: Preset, mesh: Mesh) -> None:
    """Checks whether a micro-batch can be split evenly over the mesh, and the model by an axis `tensor`."""
    rows, tensor = preset.batch // preset.accumulate, mesh.shape[TENSOR]
    rows_of_process(rows, mesh)
    preset.model.check_tensor(tensor)
    check_rows(rows // parts_of(mesh) * preset.context, tensor)  # as many tokens as in shorter rows


def make_rows(preset: Preset, documents: Documents) -> tuple[Rows, ...]:
    return (pack(documents, preset.context),) if preset.pack else one_a_row(documents, preset.context, preset.buckets)


def make_batches(preset: Preset, documents: Documents, rows: Sequence[Rows]) -> Callable[[int], Batch]:
    return row_batches(documents, rows, preset.batch * preset.context, preset.accumulate, preset.seed)


def heldout_batches(preset: Preset, documents: Documents) -> Batch:
    return even_rows(documents, pack(documents, preset.context), preset.eval_windows, preset.batch // preset.accumulate)


def with_room(preset: Preset, rows: Sequence[Rows]) -> Preset:
    """With the largest number of documents of a row, padding included, for the model; or with more, if given."""
    most = 1 + max(int(np.diff(some.first).max(initial=0)) for some in rows)
    most = max(most, preset.model.max_documents or 0)
    return dataclasses.replace(preset, model=dataclasses.replace(preset.model, max_documents=most))


def train(preset: Preset, corpus: Corpus, unit: str, run: Run, **more: Any) -> tuple[Decoder, History]:
    """As of `models.training.loop.train`, with `more` of its arguments."""
    rows = make_rows(preset, corpus.train)
    preset = with_room(preset, (*rows, pack(corpus.heldout, preset.context)))
    lengths, fill = ", ".join(str(some.length) for some in rows), overall_fill(rows)
    run.console.print(f"documents in rows of {lengths} tokens, {fill:.1%} full")
    batches, heldout = make_batches(preset, corpus.train, rows), heldout_batches(preset, corpus.heldout)
    return loop.train(LmTask(preset), batches, heldout, unit, run, **more)


def save_checkpoint(folder: Path, preset: Preset, model: Decoder, tokenizer: Tokenizer) -> str | None:
    """For `models.generate` and transformers, in the original architecture or one that fits, which is returned."""
    architecture = fitting(model.config)
    if preset.init_from is not None:
        architecture, _ = read_config(preset.init_from, ignore_config=preset.ignore_config)
    if architecture is not None:
        start = checkpoint_folder(preset)
        files = [] if start is None else [start / name for name in CHAT_FILES]
        beside: dict[str, str | bytes] = {file.name: file.read_bytes() for file in files if file.exists()}
        if isinstance(tokenizer, HuggingFace):
            beside["tokenizer.json"] = tokenizer.source
        hf.save(folder, architecture, model, like=preset.init_from, end=tokenizer.end, beside=beside)
    return architecture


def sample_of(preset: Preset, heldout: np.ndarray) -> tuple[list[int], int, dict[str, Any]]:
    """The first held-out tokens, how many to draw after them, and how."""
    prompt = heldout[: max(1, preset.context // 4)].tolist()
    how = {"sampling": Sampling(temperature=0.8), "key": jax.random.key(preset.seed)}
    return prompt, max(1, preset.context - len(prompt)), how


def write_sample(preset: Preset, model: Decoder, heldout: np.ndarray, tokenizer: Tokenizer, console: Console) -> None:
    """A continuation of the first held-out tokens, up to the context length; none of a model in the host's memory."""
    if any(isinstance(x, np.ndarray) for x in jax.tree.leaves(nnx.state(model, nnx.Param))):
        console.print("\nThe model does not fit on one device: no sample of held-out text.")
        return
    prompt, length, how = sample_of(preset, heldout)
    (written,) = generate(model, [prompt], length, **how)
    console.print("\nHeld-out text, and how the model goes on:")
    console.print(lines(tokenizer.decode(prompt)), style="dim", end="")
    stream = TextStream(tokenizer, prompt)
    console.print(lines("".join([*map(stream.add, written.tokens), stream.finish()])), style="bold")


def run(options: LmOptions) -> None:
    """Trains a decoder language model, by default a mixture of experts on bytes of the Python standard library."""
    begin, default = time.perf_counter(), Path("runs", f"lm-{options.preset}")
    launch.start_processes(options)
    with config.errors_of_options():
        preset, tokenizer = choose_tokenizer(choose(options))
        LmTask(preset).check_frozen()
        mesh = launch.choose_mesh(options, preset.model.backend)
        if mesh is not None:
            check_fits(preset, mesh)
        folder = checkpoint_folder(preset)
        preset = with_date(preset, options, default)
        own = {"raw": preset.raw_bytes, "context": preset.context, "date": preset.date}
        corpus = read_corpus(preset.data, tokenizer, folder=folder, **own)
        files = files_read(preset.data) | {str(file): file for file in tokenizer_files(preset)}
        run = launch.begin(options, preset, mesh, default, files)

    with launch.ended_in_one_line(run):
        _train_and_report(options, preset, tokenizer, corpus, run, begin)


def _train_and_report(
    options: LmOptions, preset: Preset, tokenizer: Tokenizer, corpus: Corpus, run: Run, begin: float
) -> None:
    token, baseline = ("byte" if isinstance(tokenizer, Bytes) else "token"), None
    unit, seen, held = f"nats a {token}", corpus.train.tokens, corpus.heldout.tokens
    run.say(f"{len(seen):,} {token}s to train on, {len(held):,} held out")
    if token == "byte":
        baseline = ("bigram table", bigram_nats(seen, heldout_batches(preset, corpus.heldout)))
        run.say(f"a bigram table needs {baseline[1]:.3f} nats a held-out byte")
    launch.print_model(options, preset.model, run, corpus.remark)
    prompt, length, how = sample_of(preset, held)
    sampler = lambda model: lowered(model, prompt, length, **how)
    model, history = train(preset, corpus, unit, run, sampler=sampler)
    if not is_first():
        return
    architecture = save_checkpoint(run.out / "checkpoint-hf", preset, model, tokenizer)
    plot_report(history, unit, run.out / "report.png", baseline)
    write_sample(preset, model, held, tokenizer, run.console)
    reached = f"held-out {history.last_heldout:.3f} {unit}" + (f" (bigram {baseline[1]:.3f})" if baseline else "")
    files = f"{run.out}/ has report.png, metrics.jsonl, config.yaml, and tensorboard"
    run.say("")
    run.say(f"{reached} after {time.perf_counter() - begin:.0f} s; {files}")
    fits = f"and checkpoint-hf, a {architecture}"
    run.say("no architecture of Hugging Face fits: no checkpoint" if architecture is None else fits)


main = config.command(LmOptions, run)
