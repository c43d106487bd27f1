"""Every option of a command reaches the run: a value that is not its default, and what the run then has."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import typer
from PIL import Image
from typer.testing import CliRunner

from models import train
from models.generate import command as generate
from models.generate.command import GenerateOptions
from models.generate.sampling import Sampling
from models.training import dit as train_dit
from models.training import launch
from models.training import lm as train_lm
from models.training import mm as train_mm
from models.training.dit import DitOptions
from models.training.lm import LmOptions
from models.training.mm import MmOptions
from tests.devices import needs_four

HF = Path(__file__).parents[1] / "data" / "hf"
OPTIONS = {"lm": LmOptions, "dit": DitOptions, "mm": MmOptions}
MODULES = {"lm": train_lm, "dit": train_dit, "mm": train_mm}
NEW = (
    "{} has no entry: write here a value that is not its default, what the run then has, and how to read that from it."
)


@dataclasses.dataclass
class Seen:
    """What a training command had when it would have trained.

    Attributes:
      joined: the arguments of `initialize`, if it was called.
      resumed: whether the run was compared with the one that it goes on from.
    """

    preset: Any = None
    run: Any = None
    joined: Any = None
    resumed: bool = False

    @property
    def model(self) -> Any:
        """The model's settings."""
        return getattr(self.preset, "model", self.preset)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "text.txt").write_text("all work and no play makes a dull model\n" * 40)
    (folder / "other.txt").write_text("no text is like another\n" * 40)
    (folder / "bytes.bin").write_bytes(bytes(range(256)) * 8)
    (folder / "given.yaml").write_text("steps: 7\n")
    (folder / "prompts.txt").write_text("b\nc\n")
    (folder / "hf").mkdir()  # a checkpoint without its weights, of bytes
    said = json.loads((HF / "llama" / "config.json").read_text()) | {"vocab_size": 256}
    (folder / "hf" / "config.json").write_text(json.dumps(said))
    (folder / "odd").mkdir()
    (folder / "odd" / "config.json").write_text(json.dumps(said | {"odd_key": 1}))
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"word{i}": i for i in range(400)}, unk_token="word0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    for name in ("images", "others"):
        (folder / name).mkdir()
        for i in range(20):
            Image.fromarray(np.full((8, 8), 12 * i, np.uint8)).save(folder / name / f"{i}.png")
            (folder / name / f"{i}.txt").write_text("a square")
    return folder


def seen_by(command: str, words: list[str], out: Path) -> Seen:
    """What a command has with these words."""
    seen = Seen()

    def train_instead(_, preset, *others):
        seen.preset, seen.run = preset, others[-2]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULES[command], "_train_and_report", train_instead)
        patch.setattr(launch, "initialize", lambda *given: setattr(seen, "joined", given))
        patch.setattr(launch.folders, "to_resume", lambda out, _: out)
        patch.setattr(launch.config, "read_own", lambda _: {})
        patch.setattr(launch, "check_data", lambda *_: None)
        patch.setattr(launch.config, "check_unchanged", lambda *_: setattr(seen, "resumed", True))
        ended = CliRunner().invoke(train.app, [command, *words, *(() if "--out" in words else ("--out", str(out)))])
    assert ended.exit_code == 0, ended.output
    return seen


# Of each option: the words, with FILES for the folder of files, what is read of `Seen`, and the value there.
ALL: dict[str, tuple[str, Any, Any]] = {
    "config": ("--config FILES/given.yaml", lambda s: s.preset.steps, 7),
    "set": ("--set weight_decay=0.25", lambda s: s.preset.weight_decay, 0.25),
    "steps": ("--steps 5", lambda s: s.preset.steps, 5),
    "out": ("--out OUT/there", lambda s: s.run.out.name, "there"),
    "seed": ("--seed 3", lambda s: s.preset.seed, 3),
    "backend": ("--backend xla", lambda s: s.model.backend, "xla"),
    "precision": ("--precision fp8-rowwise", lambda s: (s.model.dtype, s.model.recipe), ("bfloat16", "rowwise")),
    "offload": ("--offload", lambda s: s.model.policy and s.model.policy.offload, ("carry", "attention")),
    "freeze": ("--freeze blocks --freeze time|embed", lambda s: s.preset.freeze, ("blocks", "time|embed")),
    "save_every": ("--save-every 3", lambda s: s.run.save_every, 3),
    "resume": ("--resume --save-every 3", lambda s: s.resumed, True),
    "bad_steps": ("--bad-steps 5", lambda s: s.run.bad_steps, 5),
    "profile": ("--profile", lambda s: s.run.profile, True),
    "mesh": ("--mesh data=2,fsdp=2", lambda s: s.run.mesh and dict(s.run.mesh.shape)["fsdp"], 2),
    "coordinator": ("--coordinator host:1", lambda s: s.joined, ("host:1", None, None)),
    "processes": ("--processes 1", lambda s: s.joined, (None, 1, None)),
    "process_id": ("--process-id 0", lambda s: s.joined, (None, None, 0)),
    "distributed": ("--distributed", lambda s: s.joined, (None, None, None)),
}
WORDS = lambda s: (s.preset.tokenizer, s.model.vocab)
OWN = {
    "lm": {
        "preset": ("--preset small", lambda s: s.model.width, 384),
        "data": ("--data FILES/other.txt", lambda s: [Path(x).name for x in s.preset.data], ["text.txt", "other.txt"]),
        "raw_bytes": ("--raw-bytes --data FILES/bytes.bin", lambda s: s.preset.raw_bytes, True),
        "tokenizer": ("--tokenizer FILES/tokenizer.json", WORDS, ("FILES/tokenizer.json", 401)),
        "init_from": ("--init-from FILES/hf", lambda s: (s.preset.init_from, s.model.width), ("FILES/hf", 16)),
        "ignore_config": (
            "--init-from FILES/odd --ignore-config odd_key",
            lambda s: s.preset.ignore_config,
            ("odd_key",),
        ),
        "no_pack": ("--no-pack", lambda s: s.preset.pack, False),
    },
    "dit": {
        "preset": ("--preset small", lambda s: s.model.width, 384),
        "data": ("--data FILES/others", lambda s: s.preset.data, "FILES/others"),
    },
    "mm": {
        "preset": ("--preset 2b", lambda s: s.model.width, 2048),
        "data": ("--data FILES/others", lambda s: s.preset.data, "FILES/others"),
        "tokenizer": ("--tokenizer FILES/tokenizer.json", WORDS, ("FILES/tokenizer.json", 403)),
    },
}
ALWAYS = {"lm": "--data FILES/text.txt", "dit": "--data FILES/images --set images=16", "mm": "--data FILES/images"}


@pytest.fixture(scope="module")
def default(files, tmp_path_factory):
    """What each command has without more options."""
    words = {command: of.replace("FILES", str(files)).split() for command, of in ALWAYS.items()}
    return {command: seen_by(command, of, tmp_path_factory.mktemp(command)) for command, of in words.items()}


@pytest.mark.parametrize(
    ("command", "option"),
    [(command, field.name) for command, of in OPTIONS.items() for field in dataclasses.fields(of)],
)
@needs_four
def test_every_option_reaches_the_run(command, option, files, default, tmp_path):
    entries = ALL | OWN[command]
    assert option in entries, NEW.format(option)
    words, read, wanted = entries[option]
    put = lambda text: (
        text.replace("FILES", str(files)).replace("OUT", str(tmp_path)) if isinstance(text, str) else text
    )
    wanted = tuple(map(put, wanted)) if isinstance(wanted, tuple) else put(wanted)
    assert read(default[command]) != wanted
    assert read(seen_by(command, put(f"{ALWAYS[command]} {words}").split(), tmp_path)) == wanted


@dataclasses.dataclass
class Drawn:
    """What `completions` was called with; stopped: what `watch` says of the letter z."""

    prompts: list[list[int]]
    length: int
    sampling: Sampling
    seed: int
    slots: int
    stopped: bool
    dtypes: tuple[str, str]
    written: str


def drawn_by(words: list[str], monkeypatch) -> Drawn | str:
    """What a command draws with these words, or its error."""
    calls, loads = [], []

    def completions(_, prompts, length, *, sampling, key, ends, batching, watch):
        calls.append((prompts, length, sampling, int(key._base_array[-1]), batching.slots, watch(0, ord("z"))))
        return iter(())

    monkeypatch.setattr(generate, "completions", completions)
    monkeypatch.setattr(generate, "for_inference", lambda model, **_: model)
    monkeypatch.setattr(
        generate.hf, "load", lambda _, **how: loads.append((how["dtype"], how["param_dtype"])) or (0, 0)
    )
    command = typer.Typer()
    command.command()(generate.main)
    ended = CliRunner().invoke(command, words)
    return Drawn(*calls[0], loads[0], ended.stdout) if calls else ended.output


DRAWN: dict[str, tuple[str, Any, Any]] = {
    "folder": ("", None, None),  # all of these tests have it
    "prompt": ("xy", lambda d: d.prompts, [[97], [120, 121]]),
    "prompts": ("--prompts FILES/prompts.txt", lambda d: d.prompts, [[97], [98], [99]]),
    "chat": ("--chat", lambda d: d.prompts, [list(b"<a>")]),
    "length": ("--length 5", lambda d: d.length, 5),
    "temperature": ("--temperature 0.5", lambda d: d.sampling, Sampling(0.5, 0, 1.0)),
    "top_k": ("--top-k 3", lambda d: d.sampling, Sampling(0.0, 3, 1.0)),
    "top_p": ("--top-p 0.5", lambda d: d.sampling, Sampling(0.0, 0, 0.5)),
    "stop": ("--stop z", lambda d: d.stopped, True),
    "seed": ("--seed 9", lambda d: d.seed, 9),
    "dtype": ("--dtype bfloat16", lambda d: d.dtypes, ("bfloat16", "bfloat16")),
    "limit": ("--limit 64", lambda d: isinstance(d, str) and "more than the limit of 64" in plain(d), True),
    "slots": ("--slots 2", lambda d: d.slots, 2),
    "ignore_config": (
        "--ignore-config odd_key",
        lambda d: isinstance(d, str) and "odd_key: no key of this file" in plain(d),
        True,
    ),
}


def plain(text: str) -> str:
    """Of an error in a box."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(GenerateOptions)])
def test_every_option_of_generate_reaches_it(option, files, monkeypatch):
    assert option in DRAWN, NEW.format(option)
    words, read, wanted = DRAWN[option]
    always = [str(files / "hf"), "a"]
    if read is not None:
        found = drawn_by([*always, *words.replace("FILES", str(files)).split()], monkeypatch)
        assert read(found) == wanted != read(drawn_by(always, monkeypatch))
