"""`python -m models.train lm` on a tiny model: what it learns, what it compiles to, what it writes."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import typer
from flax import nnx

from models.data import bigram_nats, even_windows, read_corpus, source_files
from models.decoder import Decoder
from models.presets import PRESETS, Preset, of_bytes
from models.train_lm import main, make_step

TINY = Preset(
    of_bytes(layers=1, width=16, heads=2, experts=4, hidden=8), context=32, batch=4, steps=30, learning_rate=2e-2, warmup_steps=3, eval_every=15, eval_windows=8
)


@pytest.fixture(scope="module")
def corpus():
    return read_corpus()


class Command(NamedTuple):
    """A run of the command on TINY: what it printed, the folder that it wrote, the step that it compiled, and the arguments of the first step."""

    printed: str
    out: Path
    graphdef: Any
    step: Any
    first: Any


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    out, printed, seen = tmp_path_factory.mktemp("run"), io.StringIO(), {}

    def guarded_step(graphdef, preset):
        seen.update(graphdef=graphdef, step=make_step(graphdef, preset))

        def run(state, data, key):
            seen.setdefault("first", (jax.tree.map(np.array, state), data, key))
            with jax.transfer_guard("disallow"):
                return seen["step"](state, data, key)

        return run

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setitem(PRESETS, "tiny", TINY)
        patch.setattr("models.train_lm.make_step", guarded_step)
        main(preset="tiny", out=out, seed=1)
    return Command(printed.getvalue(), out, **seen)


def test_loss_falls(command):
    losses = [float(loss) for loss in re.findall(r"step \d+: held-out ([0-9.]+)", command.printed)]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(np.log(256), abs=0.5)
    assert losses[-1] < losses[0] - 1


def test_what_is_printed(command):
    assert f"{sum(p.size for p in jax.tree.leaves(command.first[0].params)):,} parameters" in command.printed
    assert "a bigram table needs" in command.printed
    assert "tokens/s" in command.printed


@pytest.mark.parametrize("name", ["loss.png", "expert_load.png"])
def test_pictures(command, name):
    assert (command.out / name).read_bytes().startswith(b"\x89PNG")


def test_step_compiles_once(command):
    assert command.step._cache_size() == 1


def test_step_never_meets_the_host(command):
    text = command.step.lower(*command.first).compile().as_text()
    for word in ("callback", "outfeed", "infeed", "send(", "recv(", "S(5)"):  # S(5) is host memory
        assert word not in text
    aliases = text.split("input_output_alias={", 1)[1].splitlines()[0]
    assert aliases.count("-alias)") == len(jax.tree.leaves(command.first[0])), "the whole state is donated"


def test_same_state_same_bits(command):
    state, data, key = command.first
    one, other = (command.step(jax.device_put(state), data, key)[0] for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_held_out_files_are_not_trained_on(tmp_path):
    texts = {f"{name}.py": f"# {name}\n".encode() for name in "abcdefghijklmnopqrstuvwxyz"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text("never read")
    assert [file.name for file in source_files(tmp_path)] == sorted(texts)
    corpus = read_corpus(tmp_path)
    train, heldout = (set(bytes(part).split(b"\0")[:-1]) for part in corpus)
    assert heldout == {b"# j\n", b"# t\n"}
    assert train == set(texts.values()) - heldout


def test_the_corpus_is_the_same_every_time(corpus):
    for part, again in zip(corpus, read_corpus(), strict=True):
        np.testing.assert_array_equal(part, again)
    assert len(corpus.train) > 5 * len(corpus.heldout) > 1_000_000


def test_no_python_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds 0 Python files"):
        read_corpus(tmp_path)


def test_bigram():
    train = np.frombuffer(b"ab" * 50_000, np.uint8)
    assert bigram_nats(train, even_windows(train, 3, 8)) < 0.01
    assert bigram_nats(train, np.frombuffer(b"zzzz", np.uint8)[None]) == pytest.approx(np.log(256))


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_presets_fit(preset):
    model = preset.model
    assert model.width % (2 * model.heads) == 0
    assert preset.eval_windows % preset.batch == 0
    assert preset.steps > preset.warmup_steps


@pytest.mark.parametrize(("name", "total"), [("small", 25e6), ("medium", 150e6), ("large", 1e9)])
def test_preset_sizes(name, total):
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(PRESETS[name].model, rngs=nnx.Rngs(0))))
    assert sum(p.size for p in jax.tree.leaves(shapes)) == pytest.approx(total, rel=0.1)


@pytest.mark.parametrize("options", [{"preset": "huge"}, {"backend": "cublas"}])
def test_wrong_options(options):
    with pytest.raises(typer.BadParameter, match="is not one of"):
        main(**options)
