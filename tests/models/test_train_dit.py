"""`python -m models.train dit` on a tiny model: it learns, compiles once, draws images, and images are independent."""

import functools
import re

import jax
import numpy as np
import pytest
import typer
import yaml
from flax import nnx
from PIL import Image

from models.data.images import DATA_SETS, DataSet, Images, pack
from models.dit.model import DiT, DiTConfig, loss_fn
from models.training import dit as train_dit
from models.training import loop
from models.training.dit import DitOptions, choose, main, sample
from models.training.presets import DIT_PRESETS, DiTPreset, rates
from tests.arrays import drawn_like
from tests.models.commands import check_step, rows_of, watched

PATCH, LONGEST = 2, 12
TINY = DiTPreset(layers=1, width=16, heads=2, tokens=40, images=6, ema=0.9, sample_steps=3, **rates(40, 1e-2, 3, 20))
CONFIG = DiTConfig(layers=1, width=16, heads=2, token=PATCH**2, classes=2, longest=LONGEST)
GRIDS = ((2, 3), (1, 1), (3, 4), (4, 3), (2, 2), (1, 5))


def two_kinds(count: int, seed: int) -> Images:
    """Class 0 is bright on the left, class 1 below."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count).astype(np.int32)
    pixels = []
    for label in labels:
        rows, columns = GRIDS[rng.integers(len(GRIDS))]
        image = np.zeros((rows * PATCH, columns * PATCH, 1), np.uint8)
        (image[:, : image.shape[1] // 2] if label == 0 else image[image.shape[0] // 2 :])[:] = 255
        pixels.append(image)
    return Images(pixels, labels)


def two_kinds_data(seed: int) -> DataSet:
    return DataSet(
        two_kinds(60, seed), two_kinds(20, seed + 1), ("left", "below"), PATCH, 1, LONGEST, ((4, 6), (8, 6), (2, 4))
    )


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DIT_PRESETS, "tiny", TINY)
        patch.setitem(DATA_SETS, "two-kinds", two_kinds_data)
        return watched(out, lambda: main(data="two-kinds", preset="tiny", out=out))


def test_loss_falls(command):
    losses = [float(loss) for loss in re.findall(r"step \d+: held-out ([0-9.]+)", command.printed)]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(2, abs=0.2), "noise and image, both of variance one"
    assert losses[-1] < 0.7 * losses[0]


def test_step(command):
    check_step(command, "_drawn", most=9)


@pytest.fixture(scope="module")
def model():
    """With random parameters: initially each block is the identity, which would hide attention."""
    model = nnx.eval_shape(lambda: DiT(CONFIG, rngs=nnx.Rngs(0)))
    nnx.update(model, drawn_like(nnx.state(model), np.random.default_rng(0), 0.25))
    return model


def noisy_images(seed: int = 0) -> Images:
    rng = np.random.default_rng(seed)
    return Images(
        [rng.integers(0, 256, (rows * PATCH, columns * PATCH, 1), np.uint8) for rows, columns in GRIDS],
        np.array([0, 1, 0, 1, 1, 0], np.int32),
    )


def test_rows_outside_reach_no_loss_and_no_gradient(model):
    batch = pack(noisy_images(), [0, 1], PATCH, 64, len(GRIDS))
    graphdef, params = nnx.split(model)
    both = jax.jit(
        jax.value_and_grad(lambda params, batch: loss_fn(nnx.merge(graphdef, params), batch, jax.random.key(0)))
    )
    tokens = batch.tokens.copy()
    tokens[batch.sequence_offsets[-1] :] = 1e3
    jax.tree.map(np.testing.assert_array_equal, both(params, batch), both(params, batch._replace(tokens=tokens)))


def test_an_evaluation_is_of_all_heldout_images_without_label_dropout(model):
    data, key = two_kinds_data(0), jax.random.key(0)
    graphdef, params = nnx.split(model, nnx.Param)
    heldout = train_dit.heldout_batches(TINY, data, None)
    assert heldout.counted() == sum(image.size // PATCH**2 for image in data.heldout.pixels)
    keys = jax.random.split(key, len(heldout.tokens))
    loss_of = nnx.jit(lambda model, batch, key: loss_fn(model, batch, key, 0.0))
    each = [jax.tree.map(lambda x, i=i: x[i], heldout) for i in range(len(keys))]
    losses = [loss_of(model, batch, own) for batch, own in zip(each, keys, strict=True)]
    wanted = np.average(losses, weights=[batch.counted() for batch in each])
    evaluate = loop.make_evaluate(graphdef, train_dit.DitTask(TINY, CONFIG))
    np.testing.assert_allclose(evaluate(params, nnx.State({}), heldout, key), wanted, rtol=1e-4)


def test_samples(model):
    data = two_kinds_data(0)
    rows = sample(model, TINY, data, seed=0)
    assert [[image.shape for image in row] for row in rows] == [
        [(height, width, 1)] * 2 for height, width in data.sample_sizes
    ]
    for row, again in zip(rows, sample(model, TINY, data, seed=0), strict=True):
        for image, same in zip(row, again, strict=True):
            np.testing.assert_array_equal(image, same)


def test_over_a_mesh_from_its_own_configuration_and_images_of_a_folder(tmp_path, capsys):
    """Micro-batches, classes by folder, new images in their sizes; each device packs its own images."""
    rng = np.random.default_rng(0)
    for label in ("cats", "dogs"):
        folder = tmp_path / "images" / label
        folder.mkdir(parents=True)
        for i in range(10):
            Image.fromarray(rng.integers(0, 255, (*rng.integers(8, 20, 2), 3), np.uint8)).save(folder / f"{i}.png")
    settings = {"layers": 1, "width": 16, "heads": 2, "tokens": 160, "images": 24, "longest": 16}
    settings |= {"accumulate": 2, "eval_every": 4, "sample_steps": 1}
    given, out = tmp_path / "given.yaml", tmp_path / "out"
    given.write_text(yaml.safe_dump(settings))
    run = functools.partial(main, config=given, data=str(tmp_path / "images"), steps=2, out=out, mesh="data=2,fsdp=2")
    run()
    assert "18 images to train on, 2 held out, 2 classes" in capsys.readouterr().out
    assert (out / "samples.png").exists()
    rows = rows_of(out)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(60 < row["tokens"] <= 160 and row["fill"] == pytest.approx(row["tokens"] / 160) for row in rows)
    assert rows[0]["heldout"] == pytest.approx(4 / 3, abs=0.3), "noise of variance one, pixels of a third"
    assert choose(DitOptions(config=out / "config.yaml")).accumulate == 2
    with pytest.raises(typer.BadParameter, match="images is 20; with 8 micro-batches and devices write multiples of 8"):
        run(set=["images=20"])
    with pytest.raises(typer.BadParameter, match="a micro-batch has 32 tokens, and an image may have 64"):
        main(config=given, set=["tokens=64", "longest=64"])
