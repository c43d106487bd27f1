"""Fine-tuning on conversations: what is read, what counts, in every way of adding it up, and the command."""

import dataclasses
import datetime
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx

from models import hf
from models.data.chat import ChatTemplate, Conversation
from models.data.packing import Batch, Documents
from models.data.text import read_texts, split, tokenize
from models.data.tokenizer import Bytes
from models.decoder import DecoderConfig
from models.decoder.loss import loss_fn
from models.generate import command as generate
from models.training import config
from models.training import lm as train_lm
from models.training.lm import main
from models.training.presets import PRESETS
from tests.arrays import put
from tests.models.test_decoder_parts import model_of

SOURCE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{{ 'a:' if add_generation_prompt }}"
TEMPLATE = ChatTemplate(SOURCE, {}, "mine")
CONFIG = DecoderConfig(256, 16, 1, 2, 2, 8, 24, tie_embeddings=True, backend="xla")


def chat(*texts: str) -> dict:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def lines_in(file, *lines: dict) -> str:
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return str(file)


def learned(documents: Documents) -> list[str]:
    """The scored bytes of each document."""
    parts = np.split(np.arange(len(documents.tokens)), documents.offsets[1:-1])
    return [bytes(documents.tokens[part][documents.scored[part]].tolist()).decode() for part in parts]


def test_what_is_read(tmp_path):
    """Texts and conversations, in one file or several."""
    file = lines_in(tmp_path / "a.jsonl", {"text": "one"}, chat("two", "three") | {"id": 3}, {"text": "four"})
    (tmp_path / "b.txt").write_text("five")
    one, two, four, five = read_texts([file, tmp_path / "b.txt"])
    assert (one, four, five) == (b"one", b"four", b"five")
    assert isinstance(two, Conversation)
    assert two.source == f"{file}, line 2"
    found = tokenize([one, b"", two, four], Bytes(), TEMPLATE, 100)
    assert learned(found.documents) == ["one\0", "three\n", "four\0"]
    assert bytes(found.documents.tokens.tolist()) == b"one\0u:two\na:three\nfour\0"
    assert found.remark == ""
    for line, says in (
        (chat(), '"messages" is'),
        ({"messages": [{"role": "x", "content": ""}]}, "the role is 'x'"),
        ({}, '"text"'),
    ):
        with pytest.raises(ValueError, match=rf"c\.jsonl, line 2.*{says}"):
            read_texts([lines_in(tmp_path / "c.jsonl", {"text": "a"}, line)])


def test_what_is_too_long_is_cut():
    """At the context, and left out where nothing of the assistant comes before."""
    chats = [
        Conversation(chat(*texts)["messages"], None, "x")
        for texts in (("ab", "cd"), ("ab", "cdefgh"), ("abcdefgh", "i"))
    ]
    found = tokenize(chats, Bytes(), TEMPLATE, 9)
    assert learned(found.documents) == ["cd\n", "cde"]
    assert found.remark == (
        "2 conversations have more than context=9 tokens and are cut there; 1 have no words of the assistant before "
        "and are left out\n"
    )
    assert tokenize(chats[:1], Bytes(), TEMPLATE, 9).remark == ""
    assert tokenize(chats[:2], Bytes(), TEMPLATE, 9).remark.endswith("are cut there\n")


def test_whole_conversations_are_held_out():
    chats = [Conversation(chat(f"question {i}", f"answer {i}")["messages"], None, "x") for i in range(12)]
    documents = lambda count: tokenize(chats[:count], Bytes(), TEMPLATE, 100).documents
    train, heldout, _ = split(documents(12))
    assert learned(heldout) == ["answer 9\n"]
    assert learned(train) == [f"answer {i}\n" for i in range(12) if i != 9]
    train, heldout, _ = split(documents(3))
    assert (learned(train), learned(heldout)) == (["answer 0\n", "answer 1\n"], ["answer 2\n"])
    with pytest.raises(ValueError, match="too little to train on"):
        split(documents(1))


@pytest.fixture(scope="module")
def model():
    return model_of(CONFIG)


def test_the_loss_is_of_the_counted_targets(model):
    """Against float64 cross-entropies of the logits; with NaN-free zero when nothing counts."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 256, (2, 2, 7))
    documents = np.array([[0, 0, 0, 1, 1, 1, -1], [0] * 7])
    scored = np.array([[1, 0, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0, 0]], bool)
    batch = Batch(*(put(x, jnp.int32) for x in (tokens, targets, documents)), put(scored))
    loss = nnx.jit(lambda model, batch: loss_fn(model, batch)[0])
    logits = np.asarray(nnx.jit(lambda model: model(batch.tokens, batch.documents)[0])(model), np.float64)
    each = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    counted = scored & (documents >= 0)
    assert int(batch.counted()) == counted.sum() == 4
    np.testing.assert_allclose(loss(model, batch), each[counted].mean(), rtol=1e-5)
    np.testing.assert_allclose(loss(model, batch._replace(scored=None)), each[documents >= 0].mean(), rtol=1e-5)
    assert loss(model, batch._replace(scored=jnp.zeros_like(batch.scored))) == 0


def test_the_date_is_that_of_the_run(tmp_path, monkeypatch):
    """Of its settings; of the run that is resumed, on another day, too; else the day on which it begins."""
    day = "{{ strftime_now('%d %b %Y') }}\n"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": day + SOURCE}))
    data = lines_in(tmp_path / "chats.jsonl", *(10 * [chat("who?", "me!")]))
    corpus = train_lm.read_corpus([data], Bytes(), folder=tmp_path, context=99, date="2026-11-27T23:59:59")
    assert bytes(corpus.train.tokens[:21].tolist()) == b"27 Nov 2026\nu:who?\na:"

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, 28, 0, 0, 1)

    monkeypatch.setattr(datetime, "datetime", Clock)
    preset, out = PRESETS["demo"], tmp_path / "out"
    out.mkdir()
    (out / "data.json").write_text("{}")
    config.write(dataclasses.replace(preset, date="2026-11-27T23:59:59"), out / "config.yaml")
    date_of = lambda given, **options: train_lm.with_date(given, train_lm.LmOptions(**options), tmp_path / "runs").date
    assert date_of(preset, out=out, resume=True) == "2026-11-27T23:59:59"
    assert date_of(preset, out=out) == date_of(preset, resume=True) == "2026-11-28T00:00:01"
    assert date_of(dataclasses.replace(preset, date="2025-01-02"), out=out, resume=True) == "2025-01-02"
    with pytest.raises(ValueError, match=r"date is '27\.11\.2026'; write it as 2026-11-27 or"):
        dataclasses.replace(preset, date="27.11.2026")


def test_the_command(tmp_path, capsys):
    """It learns one answer to all questions, which a chat with the new checkpoint then gives."""
    sizes = dataclasses.replace(CONFIG, width=32, hidden=48, layers=2)
    start, beside = tmp_path / "start", {"tokenizer_config.json": json.dumps({"chat_template": SOURCE})}
    hf.save(start, "LlamaForCausalLM", model_of(sizes), beside=beside)
    rng, words = np.random.default_rng(0), ("who", "is", "it", "now", "here")
    asked = [" ".join(rng.choice(words, 3)) for _ in range(40)]
    data = lines_in(tmp_path / "chats.jsonl", *(chat(f"{one}?", "me!") for one in asked), chat("x" * 50, "me!"))
    settings = ["context=32", "batch=8", "eval_every=60", "learning_rate=2e-2", "warmup_steps=4"]
    options = {"init_from": str(start), "steps": 60, "set": settings, "freeze": ["attention_norm"]}
    main(**options, data=[data], out=tmp_path / "out")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"step \d+: held-out ([0-9.]+)", printed)]
    assert losses[-1] < 0.1 < losses[0]
    assert "1 conversations have more than context=32 tokens and are cut there; 1 have no words" in " ".join(
        printed.split()
    )
    trained = tmp_path / "out" / "checkpoint-hf"
    generate.main(folder=trained, prompt=["now is who?"], chat=True, length=9, stop=["\n"])
    assert capsys.readouterr().out == "me!\n"
    (one, other) = (nnx.to_pure_dict(nnx.state(hf.load(folder)[1], nnx.Param)) for folder in (start, trained))
    np.testing.assert_array_equal(one["blocks"]["attention_norm"]["scale"], other["blocks"]["attention_norm"]["scale"])
    assert np.any(one["blocks"]["mlp_norm"]["scale"] != other["blocks"]["mlp_norm"]["scale"])
    with pytest.raises(typer.BadParameter, match=r"chats\.jsonl, line 1 is a conversation, .* pass --init-from"):
        main(data=[data], out=tmp_path / "no")
    (start / "tokenizer_config.json").write_text("{}")
    (start / "SHA256SUMS").unlink()
    with pytest.raises(typer.BadParameter, match="start has no chat template"):
        main(**options, data=[data], out=tmp_path / "no")
