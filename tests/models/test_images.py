"""The images and how they are packed: none lost, none cut, none twice."""

import itertools
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.images import DATA_SETS, Images, endless_batches, every_image_once, next_batch, pack, patchify, token_counts, unpatchify
from models.presets import DIT_PRESETS

PATCH, BUDGET, COUNT = 2, 24, 5
sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=40)


def images_of(grids) -> Images:
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (rows * PATCH, columns * PATCH, 1), np.uint8) for rows, columns in grids]
    return Images(pixels, np.arange(len(pixels), dtype=np.int32))


def images_in(batch) -> list[np.ndarray]:
    spans = itertools.pairwise(batch.sequence_offsets)
    return [unpatchify(batch.tokens[start:end], grid, PATCH) for (start, end), grid in zip(spans, batch.grids, strict=True) if start < end]


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
    taken = next_batch(waiting, lengths, BUDGET, COUNT)
    assert taken[0] == 0
    assert len(taken) <= COUNT
    assert sum(lengths[i] for i in taken) <= BUDGET
    assert list(waiting) == [i for i in range(len(lengths)) if i not in taken]


def test_an_endless_run_fills_its_batches_and_shows_all_images_equally_often():
    images = images_of(np.random.default_rng(0).integers(1, 5, (100, 2)))
    batches = list(itertools.islice(endless_batches(images, PATCH, 64, 20, seed=0), 120))
    assert np.mean([batch.sequence_offsets[-1] / 64 for batch in batches]) > 0.97
    seen = Counter(int(label) for batch in batches for label in batch.labels[: len(images_in(batch))])
    assert len(seen) == 100
    assert max(seen.values()) - min(seen.values()) <= 2


def test_what_does_not_fit():
    images = images_of([(4, 6), (4, 6)])
    with pytest.raises(ValueError, match="an image of 24 tokens does not fit into a budget of 23"):
        next(every_image_once(images, PATCH, 23, COUNT))
    with pytest.raises(ValueError, match="2 images of 48 tokens do not fit"):
        pack(images, [0, 1], PATCH, 47, COUNT)


def test_patches_are_row_by_row():
    pixels = np.arange(4 * 6, dtype=np.uint8).reshape(4, 6, 1)
    np.testing.assert_array_equal(np.rint((patchify(pixels, 2)[1] + 1) * 127.5), [2, 3, 8, 9])


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
