"""The images and how they are packed: none lost, none cut, none twice."""

import itertools
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from models.data.image_files import fitting_grid
from models.data.images import (
    DATA_SETS,
    Batch,
    Images,
    every_image_once,
    image_batches,
    next_batch,
    pack,
    read_data,
    token_counts,
    unpatchify,
)
from models.training.presets import DIT_PRESETS

PATCH, BUDGET, COUNT = 2, 24, 5
sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=40)


def images_of(grids) -> Images:
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (rows * PATCH, columns * PATCH, 1), np.uint8) for rows, columns in grids]
    return Images(pixels, np.arange(len(pixels), dtype=np.int32))


def images_in(batch) -> list[np.ndarray]:
    spans = itertools.pairwise(batch.sequence_offsets)
    return [
        unpatchify(batch.tokens[start:end], grid, PATCH)
        for (start, end), grid in zip(spans, batch.grids, strict=True)
        if start < end
    ]


@given(sizes)
def test_every_image_comes_whole_and_once(grids):
    images = images_of(grids)
    seen = []
    for chosen, batch in every_image_once(images, PATCH, BUDGET, COUNT):
        assert batch.tokens.shape == (BUDGET, PATCH**2)
        assert batch.sequence_offsets.shape == (COUNT + 1,)
        assert batch.grids.shape == (COUNT, 2)
        assert batch.sequence_offsets[0] == 0
        lengths = np.diff(batch.sequence_offsets)
        np.testing.assert_array_equal(lengths[: len(chosen)], batch.grids[: len(chosen)].prod(axis=1))
        assert not lengths[len(chosen) :].any()
        assert not batch.tokens[batch.sequence_offsets[-1] :].any()
        np.testing.assert_array_equal(batch.labels[: len(chosen)], chosen)
        for i, image in zip(chosen, images_in(batch), strict=True):
            np.testing.assert_array_equal(image, images.pixels[i])
        seen += chosen
    assert sorted(seen) == list(range(len(grids)))


@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=60))
def test_a_batch_takes_the_first_image_and_leaves_the_others_in_order(lengths):
    waiting = deque(range(len(lengths)))
    taken = next_batch(waiting, [(length, 1) for length in lengths], (BUDGET, COUNT))
    assert taken[0] == 0
    assert len(taken) <= COUNT
    assert sum(lengths[i] for i in taken) <= BUDGET
    assert list(waiting) == [i for i in range(len(lengths)) if i not in taken]


def micro_batches(batches, steps) -> list[Batch]:
    return [Batch(*parts) for step in steps for parts in zip(*batches(step), strict=True)]


def test_an_endless_run_fills_its_batches_and_shows_all_images():
    images = images_of(np.random.default_rng(0).integers(1, 5, (100, 2)))
    batches = micro_batches(image_batches(images, PATCH, 128, 40, 2, seed=0), range(60))
    assert {batch.tokens.shape[0] for batch in batches} == {64}
    assert np.mean([batch.counted() / 64 for batch in batches]) > 0.97
    seen = Counter(int(label) for batch in batches for label in batch.labels[: len(images_in(batch))])
    assert len(seen) == 100
    assert min(seen.values()) > 0.5 * max(
        seen.values()
    )  # what comes after an epoch's last full batch waits: other images in each


def test_a_batch_is_a_function_of_seed_and_step():
    images = images_of(np.random.default_rng(0).integers(1, 5, (100, 2)))
    make = lambda seed: image_batches(images, PATCH, 64, 20, 2, seed)
    forward, again = [make(1)(step) for step in range(20)], make(1)
    for step in reversed(range(20)):
        for one, other in zip(forward[step], again(step), strict=True):
            np.testing.assert_array_equal(one, other)
    other = make(2)
    assert any((one.labels != other(step).labels).any() for step, one in enumerate(forward))


def test_fewer_images_than_micro_batches():
    batch = image_batches(images_of([(1, 1), (2, 2)]), PATCH, 40, 20, 4, seed=0)(5)
    assert batch.tokens.shape == (4, 10, PATCH**2)
    assert [int(ends[-1]) for ends in batch.sequence_offsets] == 4 * [5]


def test_what_does_not_fit():
    images = images_of([(4, 6), (4, 6)])
    with pytest.raises(ValueError, match=r"an image of .* \(24, 1\) does not fit into a batch of \(23, 5\)"):
        next(every_image_once(images, PATCH, 23, COUNT))
    with pytest.raises(ValueError, match="2 images of 48 tokens do not fit"):
        pack(images, [0, 1], PATCH, 47, COUNT)


@pytest.mark.parametrize("name", DATA_SETS)
def test_data_sets(name):
    data, again = (DATA_SETS[name](0) for _ in range(2))
    for images in (data.train, data.heldout):
        assert len(images.pixels) == len(images.labels) > 100
        assert set(images.labels) == set(range(len(data.classes)))
        for image in images.pixels:
            assert image.dtype == np.uint8
            assert image.shape[2] == data.channels
            assert image.shape[0] % data.patch == image.shape[1] % data.patch == 0
        assert max(token_counts(images, data.patch)) <= data.longest
        assert len({image.shape for image in images.pixels}) >= 10, "sizes differ"
    for preset in DIT_PRESETS.values():
        assert preset.tokens % data.longest == 0, "the attention's blocks fill the budget"
    assert max(height * width for height, width in data.sample_sizes) <= data.longest * data.patch**2
    for image, same in zip(data.heldout.pixels, again.heldout.pixels, strict=True):
        np.testing.assert_array_equal(image, same)


def save(file, height: int, width: int, color=(250, 10, 10)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), color).save(file)


def test_a_folder_of_classes(tmp_path):
    for i in range(12):
        save(tmp_path / "red" / "deep" / f"{i:02}.png", 40, 20 + i)
        save(tmp_path / "green" / f"{i:02}.jpg", 9, 300, (10, 250, 10))
    (tmp_path / "red" / "notes.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    data = read_data(str(tmp_path), 0, patch=4, longest=32)
    assert (data.classes, data.patch, data.channels, data.longest) == (("green", "red"), 4, 3, 32)
    np.testing.assert_array_equal(data.train.labels, 11 * [0] + 11 * [1])
    np.testing.assert_array_equal(data.heldout.labels, [0, 1])
    for images in (data.train, data.heldout):
        for image, label in zip(images.pixels, images.labels, strict=True):
            assert image.dtype == np.uint8
            assert image.shape[0] % 4 == image.shape[1] % 4 == 0
            assert image[..., 1 - label].min() > 200 > 60 > image[..., label].max()
            if label == 0:
                assert image.shape == (4, 128, 3)  # very wide: a row of patches
    assert max(token_counts(data.train, 4)) <= 32
    assert set(data.sample_sizes) <= {image.shape[:2] for image in data.train.pixels}
    again = read_data(str(tmp_path), 1, patch=4, longest=32)
    for image, same in zip(data.heldout.pixels, again.heldout.pixels, strict=True):
        np.testing.assert_array_equal(image, same)


@given(st.integers(1, 5_000), st.integers(1, 5_000), st.integers(1, 16), st.integers(1, 300))
def test_grids_fit_and_keep_the_ratio(height, width, patch, longest):
    rows, columns = fitting_grid(height, width, patch, longest)
    assert 1 <= rows * columns <= longest
    assert rows == 1 or rows * patch <= height
    assert columns == 1 or columns * patch <= width
    if min(rows, columns) > 1:
        assert rows / (columns + 1) <= height / width <= (rows + 1) / columns


def test_folders_without_classes_and_those_that_cannot_be_used(tmp_path):
    read = lambda: read_data(str(tmp_path), 0, 4, 64)
    with pytest.raises(ValueError, match="'cats' is not one of digits, and no folder"):
        read_data("cats", 0, 4, 64)
    (tmp_path / "0.HEIC").touch()
    with pytest.raises(ValueError, match=r"has 0 images; of 10 in a class, one can be held out\. not read: 1 \.heic$"):
        read()
    for i in range(10):
        save(tmp_path / f"{i}.png", 16, 16)
    data = read()
    assert (data.classes, len(data.train.pixels), len(data.heldout.pixels)) == ((tmp_path.name,), 9, 1)
    for i in range(10):
        (tmp_path / f"{i}.png").unlink()
    for i in range(9):
        save(tmp_path / "one" / f"{i}.png", 8, 8)
    with pytest.raises(ValueError, match="has 9 images; of 10 in a class"):
        read()
    (tmp_path / "one" / "9.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"9\.png cannot be read as an image"):
        read()
    save(tmp_path / "beside.png", 8, 8)
    with pytest.raises(ValueError, match=r"images, as beside\.png, beside folders of images, as one"):
        read()
