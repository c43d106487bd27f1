"""`python -m models.train mm` on a tiny model: it learns, compiles once, resumes, shards, draws and captions."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx
from PIL import Image

from jaxops.nn import AmaxHistory
from models.data import images
from models.data.pairs import DATA_SETS, PairData, Pairs
from models.multimodal import show as show_mm
from models.multimodal.interleaved import Tokens, captioned, illustrated, lay_out
from models.multimodal.model import Multimodal, MultimodalConfig
from models.multimodal.sampling import caption, draw
from models.training import loop
from models.training import mm as train_mm
from models.training.mm import main, prepare, train_documents
from models.training.presets import MULTIMODAL_PRESETS, MultimodalPreset, rates
from tests.arrays import drawn_like
from tests.models.commands import check_step, rows_of, watched

MODEL = MultimodalConfig(
    vocab=258, patch_values=4, width=16, layers=1, heads=2, kv_heads=2, head_dim=8, text_experts=2, text_hidden=16,
    image_experts=2, image_hidden=16, top_k=1, tie_embeddings=True,
)  # fmt: skip
TINY = MultimodalPreset(
    model=MODEL, rows=48, predictions=32, documents=8, ema=0.9, sample_steps=2, reading_noise=0.2,
    **rates(4, 1e-2, 1, 2),
)  # fmt: skip


def two_kinds(count: int, seed: int) -> Pairs:
    """Bright or dark, of two sizes."""
    rng = np.random.default_rng(seed)
    bright = rng.integers(0, 2, count)
    pixels = [np.full((4, 2 * rng.integers(1, 3), 1), 255 * b, np.uint8) for b in bright]
    return Pairs(pixels, [(("dark", "bright")[b], "no light light"[9 * b :][:8]) for b in bright])


def two_kinds_data() -> PairData:
    return PairData(two_kinds(40, 0), two_kinds(10, 1), 2, 1)


@pytest.fixture(scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MULTIMODAL_PRESETS, "tiny", TINY)
        patch.setitem(DATA_SETS, "two-kinds", two_kinds_data)
        yield patch


@pytest.fixture(scope="module")
def command(tmp_path_factory, tiny):
    out = tmp_path_factory.mktemp("run")
    return watched(out, lambda: main(data="two-kinds", preset="tiny", out=out))


def test_what_is_printed_and_written(command):
    assert "40 images with captions to train on, 10 held out" in command.printed
    assert len(re.findall(r"step \d+: held-out [0-9.]+ nats and squared errors", command.printed)) == 3
    assert re.search(r"[0-9.]+% of the rows had a loss", command.printed)
    for name in ("samples.png", "report.png"):
        assert (command.out / name).read_bytes().startswith(b"\x89PNG")
    rows = rows_of(command.out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["loss"] > 4, "a byte of 258, and noise and image"
    assert all(0.9 < row["balance"] < 2.1 for row in rows)


def test_step(command):
    check_step(command, most=9)


@pytest.fixture(scope="module")
def model():
    """With random parameters: initially each image's block is the identity."""
    model = nnx.eval_shape(lambda: Multimodal(MODEL, rngs=nnx.Rngs(0)))
    nnx.update(model, drawn_like(nnx.state(model), np.random.default_rng(0), 0.25))
    model.eval()
    return model


TOKENS = Tokens(256, 257, 0)


def test_drawings_of_all_sizes_in_order(model):
    """Each one depends on its own prompt, and with guidance 0 on none. In one step, as the next test's; the command's
    are drawn in two.
    """
    room = prepare(TINY, two_kinds_data())[1].room
    prompts = [np.frombuffer(text, np.uint8).astype(np.int32) for text in (b"bright", b"dark", b"a", b"no light", b"x")]
    sizes = [(4, 2), (4, 4), (2, 2), (4, 4), (2, 6)]
    run = functools.partial(draw, model, sizes=sizes, tokens=TOKENS, room=room, key=jax.random.key(0), steps=1)
    drawn = run(prompts, guidance=2.0)
    assert [image.shape for image in drawn] == [(*size, 1) for size in sizes]
    others = [prompt + 1 for prompt in prompts]
    assert sum((one != other).any() for one, other in zip(drawn, run(others, guidance=2.0), strict=True)) >= 3
    for one, other in zip(run(prompts, guidance=0.0), run(others, guidance=0.0), strict=True):
        assert np.abs(one.astype(int) - other.astype(int)).max() <= 1


def test_guidance(model):
    """Between the velocities with and without the prompt, extrapolated: the step by hand."""
    room = prepare(TINY, two_kinds_data())[1].room
    prompt, blank, key = np.array([98, 99], np.int32), np.zeros((4, 4, 1), np.uint8), jax.random.key(3)
    (drawn,) = draw(model, [prompt], [(4, 4)], TOKENS, room, key, steps=1, guidance=3.0)
    run = nnx.jit(lambda model, batch, time: model.velocities(model(batch, time)[0]))
    noise = jax.random.normal(jax.random.fold_in(key, 0), (room.rows, 4))[3:7]

    def velocity(x, time):
        found = []
        for text in (prompt, prompt[:0]):
            batch, start = lay_out([illustrated(text, blank, TOKENS)], room), len(text) + 1
            batch.patches[start : start + 4] = x
            found.append(run(model, batch, np.full(room.segments, time, np.float32))[start : start + 4])
        return found[1] + 3.0 * (found[0] - found[1])

    first = velocity(noise, 1.0)
    image = noise - (first + velocity(noise - first, 0.0)) / 2
    want = np.rint((np.clip(np.asarray(image), -1, 1) + 1) * 127.5)
    got = drawn.reshape(2, 2, 2, 2).swapaxes(1, 2).reshape(4, 4).astype(float)
    assert np.abs(got - want).max() <= 1


def test_captions_are_the_likeliest_continuations(model):
    """Of several images together, as by a pass for each prefix of each."""
    room = prepare(TINY, two_kinds_data())[1].room
    images = [*two_kinds(4, 3).pixels, np.full((2, 2, 1), 99, np.uint8)]
    how = {"tokens": TOKENS, "room": room, "key": jax.random.key(0), "length": 5}
    written = caption(model, images, temperature=0.0, **how)
    run = nnx.jit(lambda model, batch: model.logits(model(batch, jnp.zeros(room.segments))[0]))
    for image, got in zip(images, written, strict=True):
        text: list[int] = []
        for _ in range(5):
            batch = lay_out([captioned(np.array(text, np.int32), image, TOKENS)], room)
            token = int(np.argmax(run(model, batch)[batch.sequence_offsets[-1] - 1]))
            if token in TOKENS:
                break
            text.append(token)
        assert got == text
    assert caption(model, images, temperature=5.0, **how) != written
    assert caption(model, images, temperature=1e-4, **how) == written  # nothing else is likely


def test_an_evaluation_is_of_clean_images_and_averaged_weights(model):
    """Captions' cross-entropies by hand: the same weight for each token of both micro-batches, images as they are."""
    room = prepare(TINY, two_kinds_data())[1].room
    image, texts = two_kinds(3, 3).pixels, [np.arange(65, 65 + length, dtype=np.int32) for length in (9, 2, 4)]
    documents = [captioned(text, pixels, TOKENS) for text, pixels in zip(texts, image, strict=True)]
    batches = [lay_out(some, room) for some in (documents[:1], documents[1:])]
    run = nnx.jit(lambda model, batch: model.logits(model(batch, jnp.zeros(room.segments))[0]))
    losses = []
    for batch in batches:
        logits = np.asarray(run(model, batch), np.float64)
        targets = batch.targets[batch.targets >= 0]
        logits = logits[batch.predicting[: len(targets)]]
        losses += (np.log(np.exp(logits).sum(1)) - logits[np.arange(len(targets)), targets]).tolist()
    assert len(losses) == 9 + 1 + 2 + 1 + 4 + 1
    preset, key = dataclasses.replace(TINY, reading_noise=0.9), jax.random.key(0)
    graphdef, average, histories = nnx.split(model, nnx.Param, AmaxHistory)
    state = loop.TrainState(jax.tree.map(jnp.zeros_like, average), histories, average, (), jnp.int32(0))
    evaluate, heldout = loop.make_evaluate(graphdef, train_mm.MmTask(preset)), images.stack(batches)
    of = lambda state: float(evaluate(loop.kept(state), histories, heldout, key))
    assert of(state) == pytest.approx(np.mean(losses), rel=1e-5)
    assert of(state._replace(average=None)) == pytest.approx(np.log(258), rel=1e-5), "all weights zero"


def test_shares_are_of_each_modality():
    """Two experts for text and four for images: an even share is a sixth. The second layer had text only."""
    preset = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, text_experts=2, image_experts=4))
    load = np.array([[3.0, 1, 2, 0, 2, 4], [5, 5, 0, 0, 0, 0]])
    wanted = [[1 / 4, 1 / 12, 1 / 6, 0, 1 / 6, 1 / 3], [1 / 6, 1 / 6, 0, 0, 0, 0]]
    np.testing.assert_allclose(train_mm.shares(preset, load), wanted, rtol=1e-6)


def test_documents_of_an_epoch():
    """Both orders, all captions, some without a caption; each image once."""
    preset = dataclasses.replace(TINY, illustrated=0.6, captionless=0.25)
    _, material = prepare(preset, PairData(two_kinds(2_000, 0), two_kinds(10, 1), 2, 1))
    documents = train_documents(preset, material.train, TOKENS, np.random.default_rng(0))
    assert len(documents) == 2_000
    drawn = [document for document in documents if document.stop < 0]
    assert len(drawn) == pytest.approx(1_200, rel=0.06)
    assert sum(len(document.parts[0]) == 1 for document in drawn) == pytest.approx(300, rel=0.15)
    texts = {bytes(document.parts[2][1:].astype(np.uint8)) for document in documents if document.stop == 0}
    assert texts == {b"dark", b"bright", b"no light", b"light"}


def test_measures_of_digits(monkeypatch, tmp_path, tiny):
    """Right and wrong drawings and captions are counted."""
    said, data = [], DATA_SETS["digits"]()
    preset, material = prepare(dataclasses.replace(TINY, rows=64), data)
    by_label = dict(zip(data.labels[0].tolist(), data.train.pixels, strict=True))
    prompts = show_mm.prompts_of(200)
    assert len(set(prompts)) == 38
    drawn = [by_label[show_mm.digit_in(prompt) if i < 150 else 0] for i, prompt in enumerate(prompts)]
    texts = [f"the digit {label}" if i % 2 else "nothing" for i, label in enumerate(data.labels[1])]
    monkeypatch.setattr(show_mm, "draw", lambda *_, **__: drawn)
    monkeypatch.setattr(show_mm, "caption", lambda *_, **__: [list(text.encode()) for text in texts[:200]])
    run = loop.Run(tmp_path, None)
    monkeypatch.setattr(loop.Run, "say", lambda _, line: said.append(line))
    show_mm.show(preset, None, data, material, run)
    assert int(re.match(r"(\d+) of 200", said[0])[1]) in range(150, 160), "and the zeros among the last fifty"
    assert re.match(r"which reads 22[0-4] of 224", said[1])
    assert said[2].startswith("100 of 200 (50.0%)")
    with Image.open(tmp_path / "samples.png") as picture:
        assert picture.width > 1_200


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"preset": "huge"}, "is not one of"),
        ({"data": "cats"}, "is not one of digits"),
        ({"set": ["rows=30"]}, r"a document of .* does not fit into a batch of \(30, "),
        ({"set": ["accumulate=3"]}, "rows is 512, predictions is 384 and accumulate 3|multiples of accumulate"),
        ({"set": ["model.top_k=9"]}, "top_k is 9"),
        ({"set": ["model.wide=9"]}, "model.wide is no setting"),
        ({"tokenizer": "none.json"}, "is no tokenizer.json"),
    ],
)
def test_wrong_options(options, error):
    with pytest.raises(typer.BadParameter, match=error):
        main(**options)
