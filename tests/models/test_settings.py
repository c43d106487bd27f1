"""Every setting of a run changes it: a value that is not its default, and which part of the run is another one then.

Programs are traced, not compiled.
"""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import pytest
import typer
from flax import nnx

from jaxops.offload import Policy
from models.data.images import Batch as ImageBatch
from models.data.packing import Batch
from models.decoder import DecoderConfig
from models.distributed import mesh
from models.distributed.mesh import make_mesh, of_own_batch
from models.hf.config import OF_A_RUN
from models.multimodal import show as show_mm
from models.multimodal.interleaved import Room, lay_out
from models.multimodal.model import MultimodalConfig
from models.training import dit as train_dit
from models.training import lm as train_lm
from models.training import loop
from models.training import mm as train_mm
from models.training.presets import DiTPreset, MultimodalPreset, Preset
from models.training.schedule import make_learning_rate
from tests.devices import needs_four
from tests.models.test_loop import text
from tests.models.test_train_dit import two_kinds_data as two_kinds_of_images
from tests.models.test_train_mm import MODEL, two_kinds_data

SCHEDULE: dict[str, Any] = {"steps": 10, "learning_rate": 1e-2, "warmup_steps": 2, "eval_every": 3}
DENSE = DecoderConfig(32, 16, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=16, backend="xla")
EXPERTS = {"experts": 4, "top_k": 2}  # where they count: they take as long again to trace
LM = Preset(DENSE, context=8, batch=2, **SCHEDULE)
SPARSE = dataclasses.replace(LM, model=dataclasses.replace(DENSE, **EXPERTS))
DIT = DiTPreset(layers=1, width=16, heads=2, tokens=40, images=6, **SCHEDULE)
MM = MultimodalPreset(model=MODEL, rows=48, predictions=32, documents=8, **SCHEDULE)
TEXT = text([9, 3, 20, 6, 30, 12, 8, 8, 40, 4])
PICTURES, PAIRS = two_kinds_of_images(0), two_kinds_data()

# Of each setting: what it changes, a value, and settings beside it; or the test that sees it.
OF_A_SCHEDULE = {
    "steps": ("rates", 12),
    "learning_rate": ("rates", 1e-3),
    "warmup_steps": ("rates", 3),
    "eval_every": "test_train_lm.py::test_metrics_are_logged",
    "accumulate": ("batches", 2),
    "seed": ("batches", 1),
}
STEPS = {"weight_decay": 0.25, "clip_norm": 2.0, "ema": 0.75, "freeze": ("blocks",)}
OF_A_STEP = {name: ("step", value) for name, value in STEPS.items()}
HERE = "test_settings.py::test_every_setting_changes_the_run"  # of `lm`, whose step is all models'
OF_A_MODEL = {
    "dtype": ("program", "bfloat16"),
    "recipe": ("program", "rowwise"),
    "backend": ("program", "pallas"),
    "policy": ("program", Policy()),
    "unroll": ("program", True),
    "sums": ("mesh", "bfloat16", {"dtype": "bfloat16"}),
}
SETTINGS: dict[type, dict[str, Any]] = {
    Preset: OF_A_SCHEDULE
    | OF_A_STEP
    | {
        "model": HERE,
        "context": ("batches", 4),
        "batch": ("batches", 4),
        "eval_windows": ("heldout", 2),
        "balance_weight": ("program", 0.5, {"model": SPARSE.model}),
        "pack": ("batches", False),
        "buckets": ("batches", 1, {"pack": False, "context": 32}),
        "date": "test_conversations.py::test_the_date_is_that_of_the_run",
    }
    | dict.fromkeys(
        ("data", "raw_bytes", "tokenizer", "init_from", "ignore_config"),
        "test_options.py::test_every_option_reaches_the_run",
    ),
    DiTPreset: OF_A_SCHEDULE
    | dict.fromkeys(OF_A_STEP, HERE)
    | OF_A_MODEL
    | {
        "layers": ("program", 2),
        "width": ("program", 32),
        "heads": ("program", 4),
        "attention": ("program", "pallas"),
        "tokens": ("batches", 30),
        "images": ("batches", 2),
        "data": ("read", "cats"),
        "patch": ("read", 8),
        "longest": ("read", 32),
        "background": ("read", "black"),
        "sample_steps": ("shown", 3),
        "guidance": ("shown", 1.25),
    },
    MultimodalPreset: OF_A_SCHEDULE
    | dict.fromkeys(OF_A_STEP, HERE)
    | {
        "model": HERE,
        "rows": ("batches", 60),
        "predictions": ("batches", 20),
        "documents": ("batches", 3),
        "data": ("read", "cats"),
        "tokenizer": "test_options.py::test_every_option_reaches_the_run",
        "patch": ("read", 8),
        "longest": ("read", 32),
        "background": ("read", "black"),
        "illustrated": ("batches", 0.1),
        "captionless": ("batches", 0.9),
        "image_weight": ("program", 3.0),
        "time_shift": ("program", 3.0),
        "reading_noise": ("program", 0.5),
        "balance_weight": ("program", 0.5),
        "sample_steps": ("shown", 3),
        "guidance": ("shown", 1.25),
        "temperature": ("shown", 0.75),
    },
    # The others are a checkpoint's: test_hf_config.py compares what they compute.
    DecoderConfig: OF_A_MODEL
    | {
        "backend": ("program", "pallas", EXPERTS),
        "fp8_experts": ("program", False, {"recipe": "rowwise", **EXPERTS}),
        "attention": ("program", "cudnn", {"max_documents": 4}),
        "max_documents": "test_decoder.py::test_there_is_room_for_the_documents_of_every_row",
        "stored_fp8": ("program", True),
    },
    Policy: {
        "keep": ("step", ("attention",)),
        "offload": ("step", ("carry",)),
        "recompute": ("step", ("moe_mlp.gate",), {"keep": ("moe_mlp",)}),
    },
    MultimodalConfig: OF_A_MODEL
    | {
        "vocab": ("program", 300),
        "patch_values": "test_train_mm.py::test_drawings_of_all_sizes_in_order",
        "width": ("program", 32),
        "layers": ("program", 2),
        "heads": ("program", 4),
        "kv_heads": ("program", 1),
        "head_dim": ("program", 16),
        "text_experts": ("program", 3),
        "text_hidden": ("program", 24),
        "image_experts": ("program", 3),
        "image_hidden": ("program", 24),
        "top_k": ("program", 2),
        "normalize": ("program", False, {"top_k": 2}),
        "qk_norm": ("program", True),
        "rope_base": ("program", 5e5),
        "norm_epsilon": ("program", 1e-5),
        "tie_embeddings": ("program", False),
    },
}
# Where an instance stands, and what it is where the preset has none.
WHERE: dict[type, tuple[Any, tuple[str, ...], Any]] = {
    Preset: (LM, (), None),
    DiTPreset: (DIT, (), None),
    MultimodalPreset: (MM, (), None),
    DecoderConfig: (LM, ("model",), None),
    MultimodalConfig: (MM, ("model",), None),
    Policy: (SPARSE, ("model", "policy"), Policy()),
}


def with_part(settings: Any, path: tuple[str, ...], part: Any) -> Any:
    """The settings with another part."""
    if not path:
        return part
    return dataclasses.replace(settings, **{path[0]: with_part(getattr(settings, path[0]), path[1:], part)})


def as_text(traced: Any) -> str:
    return re.sub(r" at 0x\w+", "", str(traced)) + str([constant.tolist() for constant in traced.consts])


def shapes_of(arrays: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)


class OfLm:
    """The parts of a run of `lm`, each for some settings."""

    task = train_lm.LmTask
    batch = Batch(*(jax.ShapeDtypeStruct((2, 8), dtype) for dtype in ("uint8", "uint8", "int32")))

    @staticmethod
    def batches(preset):
        return train_lm.make_batches(preset, TEXT, train_lm.make_rows(preset, TEXT))

    heldout = staticmethod(lambda preset: train_lm.heldout_batches(preset, TEXT))


class OfDit:
    batch = ImageBatch(
        jax.ShapeDtypeStruct((40, 4), "float32"),
        jax.ShapeDtypeStruct((7,), "int32"),
        jax.ShapeDtypeStruct((6, 2), "int32"),
        jax.ShapeDtypeStruct((6,), "int32"),
    )

    @staticmethod
    def task(preset):
        return train_dit.DitTask(preset, train_dit.sizes_of(preset, token=4, classes=2, longest=12))

    batches = staticmethod(lambda preset: train_dit.make_batches(preset, PICTURES))

    @staticmethod
    def read(preset, monkeypatch):
        return read_by(train_dit, "read_data", train_dit.DitOptions, preset, monkeypatch)

    @staticmethod
    def shown(preset, monkeypatch):
        found = []
        monkeypatch.setattr(train_dit, "generate", lambda _, batch, key, *how: found.append(how) or batch.tokens)
        train_dit.sample(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), preset, PICTURES, 0)
        return found[0]


class OfMm:
    task = train_mm.MmTask
    batch = shapes_of(lay_out([], Room(48, 32, 8, 2, 1)))
    batches = staticmethod(lambda preset: train_mm.make_batches(*train_mm.prepare(preset, PAIRS)))

    @staticmethod
    def read(preset, monkeypatch):
        return read_by(train_mm, "read_pairs", train_mm.MmOptions, preset, monkeypatch)

    @staticmethod
    def shown(preset, monkeypatch):
        found = []
        monkeypatch.setattr(show_mm, "draw", lambda *_, **how: found.append(how) or [0] * 99)
        monkeypatch.setattr(show_mm, "caption", lambda *_, **how: found.append(how) or [])
        monkeypatch.setattr(show_mm, "draw_captioned", lambda *_: None)
        show_mm.show(preset, None, PAIRS, train_mm.prepare(preset, PAIRS)[1], loop.Run(Path(), None))
        return found


class ReadError(OSError):
    """With what was to be read."""


def read_by(module, name: str, options, preset, monkeypatch) -> str:
    """What the command reads its data with."""

    def stop(*given):
        raise ReadError(repr(given))

    monkeypatch.setattr(module, name, stop)
    given = [f"{key}={getattr(preset, key)}" for key in ("data", "patch", "longest", "background", "seed")]
    with pytest.raises(typer.BadParameter) as ended:
        module.run(options(set=given))
    assert isinstance(ended.value.__cause__, ReadError)
    return str(ended.value)


@functools.cache
def part_of(preset, name: str) -> Any:
    """One part of the run, as something that can be compared."""
    of: Any = {Preset: OfLm, DiTPreset: OfDit, MultimodalPreset: OfMm}[type(preset)]
    key = jax.eval_shape(lambda: jax.random.key(0))
    if name == "rates":
        return [float(make_learning_rate(preset)(step)) for step in range(12)]
    if name == "batches":
        return jax.tree.map(lambda x: (x.shape, x.tolist()), [*map(of.batches(preset), range(3))])
    if name == "heldout":
        return jax.tree.map(lambda x: (x.shape, x.tolist()), of.heldout(preset))
    if name in ("read", "shown"):
        with pytest.MonkeyPatch.context() as patch:
            return getattr(of, name)(preset, patch)
    task = of.task(preset)
    model = lambda: task.model(nnx.Rngs(preset.seed))
    if name == "program":
        try:
            return as_text(jax.make_jaxpr(lambda batch, key: task.objective(model(), batch, key))(of.batch, key))
        except NotImplementedError as error:
            return str(error)  # of a backend that needs a GPU
    graphdef, params, others = nnx.split(nnx.eval_shape(model), nnx.Param, ...)
    if name == "mesh":
        four = make_mesh("fsdp=4")
        objective = of_own_batch(task.objective, four) if task.own_batches else task.objective
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape[of is OfLm :]), x.dtype), of.batch)
        value = loop.make_value(task.sharded_graphdef(four), objective, four, training=False)
        return as_text(jax.make_jaxpr(value)(params, others, batch, key))
    state = jax.eval_shape(lambda *given: loop.init_state(preset, *given), params, others)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), of.batch)
    return as_text(jax.make_jaxpr(loop.make_step(graphdef, task))(state, batch, key))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (owner, field.name)
        for owner in SETTINGS
        for field in dataclasses.fields(owner)
        if owner is not DecoderConfig or field.name in OF_A_RUN
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
@needs_four
def test_every_setting_changes_the_run(owner, name):
    entry = SETTINGS[owner].get(name)
    assert entry is not None, f"{name} has no entry: write what it changes, and a value that is not its default."
    if isinstance(entry, str):
        file, test = entry.split("::")
        assert f"def {test}(" in (Path(__file__).parent / file).read_text()
        return
    what, value, *beside = entry
    preset, path, otherwise = WHERE[owner]
    part = preset
    for key in path:
        part = getattr(part, key)
    before = dataclasses.replace(part or otherwise, **(beside[0] if beside else {}))
    assert value != getattr(before, name)
    after = dataclasses.replace(before, **{name: value})
    one, other = (part_of(with_part(preset, path, each), what) for each in (before, after))
    assert one != other


@pytest.mark.parametrize("preset", [LM, DIT, MM], ids=["lm", "dit", "mm"])
def test_the_same_settings_are_the_same_run(preset):
    """Else the test above would see nothing."""
    assert part_of.__wrapped__(preset, "program") == part_of(preset, "program")


@pytest.mark.parametrize("preset", [SPARSE, DIT, MM], ids=["lm", "dit", "mm"])
@needs_four
def test_gradients_of_all_parameters_are_summed_in_one_dtype(preset, monkeypatch):
    seen, gather = [], mesh.gather
    monkeypatch.setattr(mesh, "gather", lambda *given, **how: seen.append(how.get("sums")) or gather(*given, **how))
    owner = {SPARSE: DecoderConfig, DIT: DiTPreset, MM: MultimodalConfig}[preset]
    part = dataclasses.replace(getattr(preset, "model", preset), dtype="bfloat16", sums="bfloat16")
    part_of.__wrapped__(with_part(preset, WHERE[owner][1], part), "mesh")
    assert set(seen) == {"bfloat16"}


def test_a_backend_of_a_multimodal_model_is_of_all_its_ops():
    program = part_of(dataclasses.replace(MM, model=dataclasses.replace(MODEL, backend="pallas")), "program")
    assert {"adaln_fwd", "packed_attention_fwd"} <= set(re.findall(r"name=(\w+)", program))


@pytest.mark.parametrize("preset", [LM, MM], ids=["lm", "mm"])
def test_an_epsilon_is_of_all_norms(preset):
    """None has the default's, or another one of its own."""
    of = lambda **how: dataclasses.replace(preset, model=dataclasses.replace(preset.model, qk_norm=True, **how))
    small = re.compile(r"\b(?:1e-0?6|9\.9999\d*e-0?7)\b")
    assert small.search(part_of(of(), "program"))
    assert not small.search(part_of(of(norm_epsilon=0.125), "program"))
