"""`python -m models.train lm` on a tiny model: what it learns, what it compiles to, what it writes."""

import dataclasses
import os
import re
import shutil

import jax
import numpy as np
import pytest
import tokenizers
import typer
from flax import nnx

from models import hf
from models.data.tokenizer import Bytes, HuggingFace, tokenizer_of
from models.decoder import Decoder
from models.hf.config import fitting
from models.training import lm as train_lm
from models.training import loop
from models.training.config import read
from models.training.lm import LmOptions, choose, choose_tokenizer, main, read_corpus, save_checkpoint
from models.training.presets import PRESETS, Preset, of_bytes, rates
from tests.models.commands import check_step, rows_of, watched

MODEL = of_bytes(layers=1, width=16, heads=2, experts=4, hidden=8)
TINY = Preset(MODEL, context=32, batch=4, eval_windows=8, **rates(30, 2e-2, 3, 15))


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", TINY)
        return watched(out, lambda: main(preset="tiny", out=out, seed=1))


def test_loss_falls(command):
    losses = [float(loss) for loss in re.findall(r"step \d+: held-out ([0-9.]+)", command.printed)]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(np.log(256), abs=0.5)
    assert losses[-1] < losses[0] - 1


def test_what_is_printed(command):
    assert f"{sum(p.size for p in jax.tree.leaves(command.first[0].params)):,} parameters" in command.printed
    assert "a bigram table needs" in command.printed
    assert "tokens/s" in command.printed


def test_metrics_are_logged(command):
    rows = rows_of(command.out)
    assert [row["step"] for row in rows] == list(range(1, TINY.steps + 1))
    names = {"step", "loss", "balance", "tokens", "fill", "learning_rate", "gradient_norm", "tokens_per_s"}
    assert set(rows[0]) == names | {"heldout", "compile_s"}
    assert all(set(row) - {"heldout"} == names for row in rows[1:])
    assert [row["step"] for row in rows if "heldout" in row] == [1, 15, 30]
    assert all(row["tokens"] == 4 * 32 * row["fill"] and row["fill"] > 0.9 for row in rows)
    assert max(row["learning_rate"] for row in rows) == rows[3]["learning_rate"] == pytest.approx(TINY.learning_rate)
    assert len(list((command.out / "tensorboard").iterdir())) == 1


def test_the_checkpoint_is_the_trained_model(command):
    architecture, model = hf.load(command.out / "checkpoint-hf")
    assert architecture == "MixtralForCausalLM"
    assert isinstance(tokenizer_of(command.out / "checkpoint-hf", model.config.vocab), Bytes)
    graphdef, params, histories = nnx.split(model, nnx.Param, ...)
    heldout = train_lm.heldout_batches(TINY, read_corpus((), Bytes()).heldout)
    loss = loop.make_evaluate(graphdef, train_lm.LmTask(TINY))(params, histories, heldout, jax.random.key(0))
    reached = float(re.findall(r"step \d+: held-out ([0-9.]+)", command.printed)[-1])
    assert float(loss) == pytest.approx(reached, abs=2e-3)


def test_going_on_from_a_checkpoint(command, tmp_path, capsys, monkeypatch):
    """It starts from the checkpoint, on other text, and writes the same architecture."""
    for name in ("plot_report", "write_sample"):  # the first run has them
        monkeypatch.setattr(train_lm, name, lambda *_: None)
    (tmp_path / "text.txt").write_text("all work and no play makes a dull model\n" * 200)
    start = str(command.out / "checkpoint-hf")
    settings = ["context=32", "batch=4", "eval_windows=8", "eval_every=10", "accumulate=2", "buckets=1"]
    main(init_from=start, data=[str(tmp_path / "text.txt")], steps=10, out=tmp_path / "out", set=settings, no_pack=True)
    losses = [float(loss) for loss in re.findall(r"step \d+: held-out ([0-9.]+)", capsys.readouterr().out)]
    assert losses[0] < np.log(256) - 1 > losses[1]
    assert losses[1] < losses[0]
    assert hf.read_config(tmp_path / "out" / "checkpoint-hf") == hf.read_config(start)
    written = read(tmp_path / "out" / "config.yaml")
    assert (written["init_from"], written["model"]["width"], written["pack"]) == (start, 16, False)
    assert choose(LmOptions(config=tmp_path / "out" / "config.yaml")).model.experts == 4
    with pytest.raises(
        typer.BadParameter, match=r"model\.width is 32, the checkpoint's is 16: with init_from leave them out"
    ):
        main(init_from=start, set=["model.width=32"])
    with pytest.raises(typer.BadParameter, match=r"config\.json"):
        main(init_from=str(tmp_path))
    damaged = shutil.copytree(start, tmp_path / "damaged")
    os.truncate(damaged / "model.safetensors", 99)
    (damaged / "SHA256SUMS").unlink()
    with pytest.raises(typer.BadParameter, match=r"damaged/model\.safetensors cannot be read: .*Copy the file again"):
        main(init_from=str(damaged), data=[str(tmp_path / "text.txt")], out=tmp_path / "another", set=settings)


def test_tokenizers(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"word{i}": i for i in range(300)}, unk_token="word0"))
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    preset = dataclasses.replace(TINY, tokenizer=str(tmp_path / "tokenizer.json"))
    chosen, tokenizer = choose_tokenizer(preset)
    assert (chosen.model.vocab, tokenizer.end) == (301, 300)
    model = Decoder(chosen.model, rngs=nnx.Rngs(0))
    assert save_checkpoint(tmp_path / "hf", chosen, model, tokenizer) == "MixtralForCausalLM"

    started = dataclasses.replace(TINY, init_from=str(tmp_path / "hf"), model=chosen.model)
    _, beside = choose_tokenizer(started)
    assert isinstance(beside, HuggingFace)
    assert (beside.end, beside.encode("word7")) == (300, [7])
    made.add_tokens(["one more"])
    made.save(str(tmp_path / "larger.json"))
    with pytest.raises(ValueError, match=r"the tokenizer has 302 tokens, and the checkpoint in .* 301"):
        choose_tokenizer(dataclasses.replace(started, tokenizer=str(tmp_path / "larger.json")))


def test_a_dense_model_and_one_that_no_architecture_fits(tmp_path):
    dense = dataclasses.replace(TINY.model, experts=0, top_k=0)
    assert (
        save_checkpoint(tmp_path, dataclasses.replace(TINY, model=dense), Decoder(dense, rngs=nnx.Rngs(0)), Bytes())
        == "LlamaForCausalLM"
    )
    odd = dataclasses.replace(TINY.model, normalize=False)
    assert save_checkpoint(tmp_path, TINY, Decoder(odd, rngs=nnx.Rngs(0)), Bytes()) is None
    assert {fitting(preset.model) for preset in PRESETS.values()} == {"MixtralForCausalLM", "Qwen3MoeForCausalLM"}


def test_step(command):
    check_step(command, "_prefill", "advance", "_converted", most=29)


@pytest.mark.parametrize(
    ("name", "total"), [("small", 25e6), ("medium", 150e6), ("large", 1e9), ("3b", 3.1e9), ("30b", 30.5e9)]
)
def test_preset_sizes(name, total):
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(PRESETS[name].model, rngs=nnx.Rngs(0))))
    assert sum(p.size for p in jax.tree.leaves(shapes)) == pytest.approx(total, rel=0.1)
