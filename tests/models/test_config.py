"""A run's settings from a preset, a file and the command line, each over those before, and errors of wrong ones."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from models.training import config
from models.training import dit as train_dit
from models.training import lm as train_lm
from models.training.config import assignments, with_model
from models.training.dit import DitOptions
from models.training.lm import LmOptions
from models.training.presets import DIT_PRESETS, PRESETS

# Texts that YAML 1.1 or 1.2 could read as something else.
HARD = (
    *("1e3", "089", "012", "no", "~", "null", "", "1:30", "2026-11-27", "0o7", "0x1f", "1_000", "true", "<<", ".5"),
    *("a: b", " x", "x ", "#a", "\u00e9\u2028", "- a", "*a", "&a", "!x", "%s", "[red]", "{}", "\\d", "a\nb", "'\""),
)  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        (tmp_path / "given.yaml").write_text(text)
        return tmp_path / "given.yaml"

    return write


def test_assignments():
    texts = ["model.width=64", "learning_rate=1e-3", "model.recipe=null", "data=[a, b]", "model.width=32", "name=a=b"]
    model = {"width": 32, "recipe": None}
    assert assignments(texts) == {"model": model, "learning_rate": 1e-3, "data": ["a", "b"], "name": "a=b"}
    for wrong in ("width", "=3", "width=[3"):
        with pytest.raises(ValueError, match="--set"):
            assignments([wrong])


def test_each_goes_over_those_before(write):
    file = write(
        "steps: 7\nlearning_rate: 2e-3\nseed: 5\ncontext: 64\n"
        "model: {layers: 3, recipe: blockwise, backend: pallas}\ndata: [a.txt]\n"
    )
    options = {"set": ["seed=6", "context=32"], "seed": 8, "data": ["b.txt", "c"], "no_pack": True}
    chosen = train_lm.choose(LmOptions(preset="small", config=file, precision="bfloat16", **options))
    changed = {"steps": 7, "learning_rate": 2e-3, "warmup_steps": 1, "seed": 8, "context": 32}
    small = with_model(PRESETS["small"], layers=3, backend="pallas", dtype="bfloat16")
    assert chosen == dataclasses.replace(small, data=("b.txt", "c"), pack=False, **changed)

    file = write("width: 64\nrecipe: rowwise\nwarmup_steps: 50")
    image = train_dit.choose(DitOptions(config=file, steps=60, precision="fp8-blockwise", data="folder", backend="xla"))
    changed = {"width": 64, "warmup_steps": 50, "steps": 60, "data": "folder", "backend": "xla"}
    assert image == dataclasses.replace(DIT_PRESETS["demo"], dtype="bfloat16", recipe="blockwise", **changed)


@pytest.mark.parametrize(
    "chosen",
    [
        PRESETS["medium"],
        dataclasses.replace(PRESETS["demo"], data=("a", "b"), learning_rate=1e-5),
        dataclasses.replace(PRESETS["demo"], data=HARD),
        DIT_PRESETS["small"],
    ],
)
def test_what_is_written_is_read_back(chosen, tmp_path):
    config.write(chosen, tmp_path / "config.yaml")
    given = config.read(tmp_path / "config.yaml")
    others = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert others["data"] == given["data"], "plain YAML for any loader"
    assert set(given) == {field.name for field in dataclasses.fields(chosen)}
    assert config.resolve((PRESETS if "model" in given else DIT_PRESETS)["demo"], given) == chosen


WRONG = {
    "learning_rat: 1": r"^learning_rat is no setting: write one of steps, learning_rate, .*, buckets, date$",
    "seed: 1\nmodel: {widht: 1}": r"^model\.widht is no setting: write one of vocab, width, .*, unroll, ",
    "model: 3": "^model is 3: ",
    "batch: 2.5": r"^batch is 2\.5: .*integer",
    "batch: true": "batch is True: .*integer",
    "learning_rate: fast": "learning_rate is 'fast': .*number",
    "steps: 0\nclip_norm: -1.0": r"steps is 0: .*greater than 0; clip_norm is -1\.0: .*greater than 0$",
    "ema: 1.0": r"ema is 1\.0: .*less than 1",
    "model: {backend: cuda, dtype: int8}": r"model\.dtype is 'int8': .*model\.backend is 'cuda': .*'pallas'",
    "model: {kv_heads: 3}": "heads must be a multiple of kv_heads",
    "accumulate: 3": "batch is 16 and accumulate 3",
    "data: text": r"data is 'text': .*write a list, as \[a, b\]$",
    "tokenizer: 1e3": r"tokenizer is 1000\.0: .*valid string; write quotes",
    "pack: no": "pack is 'no': .*boolean; write true or false$",
    "eval_every: 1:30": "eval_every is '1:30': .*integer",
    "learning_rate: .inf": r"learning_rate is '\.inf': .*number",
    "learning_rate: 1e400": "Out of range float",
    "seed: 4294967296": "seed is 4294967296: .*less than 4294967296",
    "steps: 5\nmodel: {layers: 1}\nsteps: 6": r"line 3 .*: steps stands here a second time: leave one out\.$",
    "1: 2": r"line 1 .*: 1 is no name of a setting\.$",
    "model:\n\tlayers: 3": r"line 2 .*'\\t'",
    "data: *.txt": "line 1 .*while scanning an alias",
    "--- {steps: 4}\n--- {steps: 5}": "line 2 .*expected a single document",
    "a: &a [*a]": "line 1 .*recursive",
    5000 * "[": "cannot be read as YAML: maximum recursion",
    "[1, 2]": "holds list; it must be a mapping",
    "# nothing": "holds no settings; it must be a mapping",
    "a: [": "line 1 cannot be read as YAML",
    "a: \x00": "cannot be read as YAML: .*special characters",
}


@pytest.mark.parametrize(("text", "says"), WRONG.items(), ids=range(len(WRONG)))
def test_what_is_wrong_is_named(text, says, write):
    with pytest.raises(ValueError, match=says) as caught:
        train_lm.choose(LmOptions(config=write(text)))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8(write):
    file = write("")
    file.write_bytes("tokenizer: caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"given\.yaml cannot be read as YAML: .*position 14"):
        config.read(file)
    file.write_bytes("\ufefftokenizer: caf\xe9".encode())
    assert config.read(file) == {"tokenizer": "caf\xe9"}


CORE = {text: text for text in ("no", "off", "1:30", "2026-11-27", "0b11", "a#b", "C:\\x")} | {
    ".5": 0.5, "5.": 5.0, "-1e-3": -1e-3, "1E+2": 100.0, "0x1f": 31, "0o17": 15, "+7": 7, "012": 12, "~": None,
    "": None, "null": None, "true": True, "False": False, '"012"': "012", "''": "", "3 ": 3, "'a #1' ": "a #1",
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), CORE.items())
def test_values_are_those_of_the_core_schema(text, value, write):
    """Of YAML 1.2.2, section 10.3; the same in a file and after --set."""
    for found in (config.read(write(f"a: {text}")), assignments([f"a={text}"])):
        assert found == {"a": value}
        assert type(found["a"]) is type(value)


def test_what_is_wrong_with_an_image_model(write):
    with pytest.raises(ValueError, match="width is 36 and heads 4"):
        train_dit.choose(DitOptions(set=["width=36"]))
    with pytest.raises(ValueError, match="must be multiples of accumulate"):
        train_dit.choose(DitOptions(set=["accumulate=5"]))
    with pytest.raises(ValueError, match="model is no setting"):
        train_dit.choose(DitOptions(config=write("model: {width: 3}")))


def test_attention_is_this_machines(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert train_lm.choose(LmOptions()).model.attention == "auto"
    assert train_lm.choose(LmOptions(precision="float32")).model.attention == "xla"
    assert train_lm.choose(LmOptions(set=["model.attention=xla"])).model.attention == "xla"
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    with pytest.raises(ValueError, match="needs a GPU; write xla"):
        train_lm.choose(LmOptions(set=["model.attention=cudnn"]))


def test_a_name_that_is_not_utf8():
    with pytest.raises(ValueError, match=r'^"\\udcffa\.txt" is not UTF-8: give the file or folder another name\.$'):
        train_lm.choose(LmOptions(data=["b.txt", "\udcffa.txt"]))
