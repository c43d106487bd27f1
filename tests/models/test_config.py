"""A run's settings from a preset, a file and the command line, each over those before, and errors of wrong ones."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from models import config, train_dit, train_lm
from models.config import assignments, overlay
from models.presets import DIT_PRESETS, PRESETS
from models.train_dit import DitOptions
from models.train_lm import LmOptions


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        (tmp_path / "given.yaml").write_text(text)
        return tmp_path / "given.yaml"

    return write


def test_mappings_are_overlaid():
    below = {"a": 1, "b": {"c": 2, "d": {"e": 3}}}
    assert overlay(below, {"b": {"d": {"f": 4}}, "g": {}}) == {"a": 1, "b": {"c": 2, "d": {"e": 3, "f": 4}}, "g": {}}
    assert overlay(below, {"b": 5, "a": {"h": 6}}) == {"a": {"h": 6}, "b": 5}
    assert below == {"a": 1, "b": {"c": 2, "d": {"e": 3}}}


def test_assignments():
    given = assignments(
        [
            "model.width=64",
            "learning_rate=1e-3",
            "model.rope_base=2.5e3",
            "model.recipe=null",
            "data=[a, b]",
            "model.width=32",
            "tokenizer=a=b",
        ]
    )
    assert given == {
        "model": {"width": 32, "rope_base": 2500.0, "recipe": None},
        "learning_rate": 1e-3,
        "data": ["a", "b"],
        "tokenizer": "a=b",
    }
    for wrong in ("width", "=3", "width=[3"):
        with pytest.raises(ValueError, match="--set"):
            assignments([wrong])


def test_each_goes_over_those_before(write):
    file = write(
        "steps: 7\nlearning_rate: 2e-3\nseed: 5\ncontext: 64\n"
        "model: {layers: 3, recipe: blockwise, backend: pallas}\ndata: [a.txt]\n"
    )
    options = {
        "set": ["seed=6", "context=32"],
        "seed": 8,
        "precision": "bfloat16",
        "data": ["b.txt", "c"],
        "no_pack": True,
    }
    chosen = train_lm.choose(LmOptions(preset="small", config=file, **options))
    small = PRESETS["small"]
    changed = {
        "steps": 7,
        "learning_rate": 2e-3,
        "warmup_steps": 1,
        "seed": 8,
        "context": 32,
        "data": ("b.txt", "c"),
        "pack": False,
    }
    assert chosen == dataclasses.replace(
        small, model=dataclasses.replace(small.model, layers=3, backend="pallas", dtype="bfloat16"), **changed
    )

    file = write("width: 64\nrecipe: rowwise\nwarmup_steps: 50")
    image = train_dit.choose(DitOptions(config=file, steps=60, precision="fp8-blockwise", data="folder", backend="xla"))
    changed = {
        "width": 64,
        "warmup_steps": 50,
        "steps": 60,
        "dtype": "bfloat16",
        "recipe": "blockwise",
        "data": "folder",
        "backend": "xla",
    }
    assert image == dataclasses.replace(DIT_PRESETS["demo"], **changed)


@pytest.mark.parametrize(
    "chosen",
    [
        PRESETS["medium"],
        dataclasses.replace(PRESETS["demo"], data=("a", "b"), learning_rate=1e-5),
        DIT_PRESETS["small"],
    ],
)
def test_what_is_written_is_read_back(chosen, tmp_path):
    config.write(chosen, tmp_path / "config.yaml")
    given = config.read(tmp_path / "config.yaml")
    assert set(given) == {field.name for field in dataclasses.fields(chosen)}
    assert config.resolve((PRESETS if "model" in given else DIT_PRESETS)["demo"], given) == chosen


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("learning_rat: 1", r"^learning_rat is no setting: write one of steps, learning_rate, .*, buckets$"),
        ("model: {widht: 1}", r"^model\.widht is no setting: write one of vocab, width, .*, unroll, .*"),
        ("model: 3", r"^model is 3: "),
        ("batch: 2.5", r"^batch is 2.5: .*integer"),
        ("batch: true", r"^batch is True: .*integer"),
        ("learning_rate: fast", r"^learning_rate is 'fast': .*number"),
        ("steps: 0\nclip_norm: -1.0", r"^steps is 0: .*greater than 0; clip_norm is -1\.0: .*greater than 0$"),
        ("ema: 1.0", r"^ema is 1\.0: .*less than 1"),
        ("pack: maybe", r"^pack is 'maybe': "),
        (
            "model: {backend: cuda, dtype: int8}",
            r"^model\.dtype is 'int8': .*'bfloat16'.*; model\.backend is 'cuda': .*'pallas'",
        ),
        ("model: {kv_heads: 3}", "heads must be a multiple of kv_heads"),
        ("model: {head_dim: 7}", "rotary_dim is 7 of head_dim 7"),
        ("model: {top_k: 9}", "top_k is 9 of 4 experts"),
        ("accumulate: 3", "batch is 16 and accumulate 3"),
        ("data: text", r"^data is 'text': "),
        ("[1, 2]", "holds list; it must be a mapping"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_what_is_wrong_is_named(text, says, write):
    with pytest.raises(ValueError, match=says):
        train_lm.choose(LmOptions(config=write(text)))


def test_what_is_wrong_with_an_image_model(write):
    with pytest.raises(ValueError, match="width is 36 and heads 4"):
        train_dit.choose(DitOptions(set=["width=36"]))
    with pytest.raises(ValueError, match="must be multiples of accumulate"):
        train_dit.choose(DitOptions(set=["accumulate=5"]))
    with pytest.raises(ValueError, match="model is no setting"):
        train_dit.choose(DitOptions(config=write("model: {width: 3}")))


def test_attention_is_this_machines(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert train_lm.choose(LmOptions()).model.attention == "cudnn"
    assert train_lm.choose(LmOptions(precision="float32")).model.attention == "xla"
    assert train_lm.choose(LmOptions(set=["model.attention=xla"])).model.attention == "xla"
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    with pytest.raises(ValueError, match="needs a GPU; write xla"):
        train_lm.choose(LmOptions(set=["model.attention=cudnn"]))


def test_yaml_is_what_others_read(tmp_path):
    """The written file is plain YAML for any loader."""
    config.write(PRESETS["demo"], tmp_path / "config.yaml")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["norm_epsilon"] == 1e-6
