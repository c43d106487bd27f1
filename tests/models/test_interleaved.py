"""Documents of text and images in batches: each row in its place, each document whole and once, nothing padded."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.data.images import unpatchify
from models.multimodal.interleaved import (
    Document,
    Room,
    Tokens,
    captioned,
    document_batches,
    every_document_once,
    illustrated,
    lay_out,
    size_of,
)

TOKENS, ROOM = Tokens(begin=50, end=51, stop=0), Room(rows=40, predictions=16, documents=4, patch=2, channels=1)


def image_of(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (2 * rows, 2 * columns, 1), np.uint8)


def text_of(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_rows_segments_and_predictions():
    image, other = image_of(2, 3), image_of(1, 2, seed=1)
    batch = lay_out([captioned(text_of(7, 8), image, TOKENS), illustrated(text_of(9), other, TOKENS)], ROOM)
    assert batch.sequence_offsets.tolist() == [0, 10, 14, 14, 14]
    assert batch.segment_offsets.tolist() == [0, 1, 7, 10, 12, *9 * [14]][:13]
    assert batch.is_image.tolist() == [False, True, False, False, True, *7 * [False]]
    assert batch.is_read.tolist() == [False, True, *10 * [False]], "only an image with text after it is read"
    assert batch.grids[:5].tolist() == [[1, 1], [2, 3], [1, 1], [1, 1], [1, 2]]
    assert batch.tokens[:14].tolist() == [50, *6 * [0], 51, 7, 8, 9, 50, 0, 0]
    # The end of the image predicts the caption's first token, its last one the end; a caption before its image the
    # begin of the image.
    assert batch.predicting[:4].tolist() == [7, 8, 9, 10]
    assert batch.targets.tolist() == [7, 8, 0, 50, *12 * [-1]]
    for (start, end), pixels in (((1, 7), image), ((12, 14), other)):
        np.testing.assert_array_equal(
            unpatchify(batch.patches[start:end], (pixels.shape[0] // 2, pixels.shape[1] // 2), 2), pixels
        )
    assert not batch.patches[[0, *range(7, 12), *range(14, 40)]].any()
    assert batch.counted() == 4 + 2, "no patch of an image that is read"
    assert batch.size == 40


def test_text_and_images_in_turn():
    parts = (image_of(1, 1), text_of(1, 2, 3), image_of(1, 2), text_of(4))
    batch = lay_out([Document(parts, stop=0)], ROOM)
    assert batch.segment_offsets[:5].tolist() == [0, 1, 4, 6, 7]
    assert batch.is_read[:4].tolist() == [True, False, True, False]
    assert (batch.predicting[:3].tolist(), batch.targets[:4].tolist()) == ([1, 2, 6], [2, 3, 0, -1])
    assert size_of(Document(parts, stop=0), 2) == (7, 3, 1, 4)


def test_nothing_before_the_image_of_anything():
    batch = lay_out([illustrated(text_of(), image_of(1, 1), TOKENS)], ROOM)
    assert batch.tokens[:2].tolist() == [50, 0]
    assert (batch.targets == -1).all()
    assert batch.counted() == 1


def test_no_documents():
    batch = lay_out([], ROOM)
    assert batch.counted() == 0
    assert not batch.sequence_offsets.any()
    assert not batch.segment_offsets.any()


def random_documents(rng: np.random.Generator, count: int) -> list[Document]:
    return [
        (captioned, illustrated)[i % 2](
            rng.integers(1, 50, rng.integers(1, 6)).astype(np.int32),
            image_of(*rng.integers(1, 4, 2), seed=int(rng.integers(100))),
            TOKENS,
        )
        for i in range(count)
    ]


@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_every_document_comes_whole_and_once(seed, count):
    documents, seen = random_documents(np.random.default_rng(seed), count), []
    for chosen, batch in every_document_once(documents, ROOM):
        seen += chosen
        for i, (start, end) in zip(chosen, itertools.pairwise(batch.sequence_offsets), strict=False):
            alone = lay_out([documents[i]], ROOM)
            length = alone.sequence_offsets[1]
            assert end - start == length
            np.testing.assert_array_equal(batch.tokens[start:end], alone.tokens[:length])
            np.testing.assert_array_equal(batch.patches[start:end], alone.patches[:length])
            mine = (batch.predicting >= start) & (batch.predicting < end) & (batch.targets >= 0)
            np.testing.assert_array_equal(batch.predicting[mine] - start, alone.predicting[alone.targets >= 0])
            np.testing.assert_array_equal(batch.targets[mine], alone.targets[alone.targets >= 0])
    assert sorted(seen) == list(range(count))


def test_batches_are_a_function_of_seed_and_step():
    make = lambda seed: document_batches(lambda rng: random_documents(rng, 20), ROOM, 2, seed)
    forward, again = [make(1)(step) for step in range(12)], make(1)
    for step in reversed(range(12)):
        for one, other in zip(forward[step], again(step), strict=True):
            assert one.shape[0] == 2
            np.testing.assert_array_equal(one, other)
    other = make(2)
    assert any((one.tokens != other(step).tokens).any() for step, one in enumerate(forward))
    fill = np.mean([batch.sequence_offsets[:, -1] / 40 for batch in forward])
    assert fill > 0.8


def test_what_does_not_fit():
    long = captioned(text_of(*range(1, 21)), image_of(1, 1), TOKENS)
    with pytest.raises(ValueError, match=r"\(23, 21, 1, 3\) do not fit into a batch of \(40, 16, 4, 12\)"):
        lay_out([long], ROOM)
    with pytest.raises(ValueError, match=r"a document of .* \(23, 21, 1, 3\) does not fit"):
        every_document_once([long], ROOM)
