"""Packed documents: every prediction once, none across a document's end; batches are a function of seed and step."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.data.packing import (
    Documents,
    choose_buckets,
    even_rows,
    one_a_row,
    overall_fill,
    pack,
    row_batches,
)

LENGTH = 16
many_lengths = st.lists(st.one_of(st.integers(0, 3), st.integers(1, 70)), min_size=1, max_size=40).filter(
    lambda lengths: max(lengths) > 1
)


def documents_of(lengths, scored=None) -> Documents:
    """All tokens differ, so that each one is identifiable."""
    return Documents(np.arange(sum(lengths), dtype=np.uint32), np.cumsum([0, *lengths]), scored)


def predictions_of(batch) -> list[tuple[int, int]]:
    """(token, target) of all counted predictions of a batch."""
    counted = batch.documents >= 0
    return list(zip(batch.tokens[counted].tolist(), batch.targets[counted].tolist(), strict=True))


def all_predictions(lengths) -> list[tuple[int, int]]:
    ends = np.cumsum(lengths)
    return [(i, i + 1) for length, end in zip(lengths, ends, strict=True) for i in range(end - length, end - 1)]


def check_rows(batch) -> None:
    """Each row has pieces one after another, numbered from 0, then padding."""
    for tokens, documents in zip(
        batch.tokens.reshape(-1, batch.tokens.shape[-1]),
        batch.documents.reshape(-1, batch.tokens.shape[-1]),
        strict=True,
    ):
        count = (documents >= 0).sum()
        assert (documents[count:] == -1).all()
        inside = documents[:count]
        assert set(np.diff(inside)) <= {0, 1}
        assert not count or inside[0] == 0
        for (one, two), step in zip(itertools.pairwise(tokens[:count]), np.diff(inside), strict=True):
            assert step or int(two) == int(one) + 1


@given(many_lengths)
def test_every_prediction_lies_in_one_row(lengths):
    documents = documents_of(lengths)
    rows = pack(documents, LENGTH)
    batch = even_rows(documents, rows, rows.row_count, 3)
    assert batch.tokens.shape[1:] == (3, LENGTH)
    check_rows(batch)
    assert sorted(predictions_of(batch)) == all_predictions(lengths)
    assert batch.counted() == len(all_predictions(lengths))


@given(many_lengths)
def test_every_scored_token_is_a_counted_target_once(lengths):
    """A document's first token is no target."""
    documents = documents_of(lengths, np.random.default_rng(0).random(sum(lengths)) < 0.3)
    for found in ((pack(documents, LENGTH),), one_a_row(documents, LENGTH, 3)):
        batches = [even_rows(documents, rows, rows.row_count, 1) for rows in found]
        assert not any((batch.counts() & (batch.documents < 0)).any() for batch in batches)
        seen = np.concatenate([batch.targets[batch.counts()] for batch in batches])
        np.testing.assert_array_equal(np.sort(seen), np.setdiff1d(np.flatnonzero(documents.scored), documents.offsets))
        assert sum(batch.counted() for batch in batches) == len(seen)


@given(many_lengths, st.integers(1, 3))
def test_a_document_a_row(lengths, most):
    documents = documents_of(lengths)
    found = one_a_row(documents, LENGTH, most)
    assert 1 <= len(found) <= most
    seen = []
    for rows in found:
        batch = even_rows(documents, rows, rows.row_count, 1)
        assert batch.documents.max() == 0
        assert rows.length in (16, 8)
        check_rows(batch)
        seen += predictions_of(batch)
    assert sorted(seen) == all_predictions(lengths)


def test_rows_are_full():
    """A typical mix: a few long documents, many short ones."""
    lengths = np.random.default_rng(0).lognormal(5, 1.2, 3_000).astype(int) + 2
    assert overall_fill((pack(documents_of(lengths), 256),)) > 0.99


def test_buckets_pad_least():
    assert choose_buckets(np.array([100, 99, 60, 7, 8, 5]), 128, 3) == (8, 64, 128)
    assert choose_buckets(np.array([100, 99, 60, 7, 8, 5]), 128, 2) == (8, 128)
    assert choose_buckets(np.array([3, 7]), 128, 3) == (8,)  # no bucket that nothing needs
    assert choose_buckets(np.array([300, 10]), 300, 3) == (75, 300)
    assert choose_buckets(np.array([], np.int64), 128, 3) == (8,)


@pytest.fixture(scope="module")
def unpacked():
    """(documents, their rows) in three buckets."""
    documents = documents_of(np.random.default_rng(1).integers(2, 64, 300).tolist())
    rows = one_a_row(documents, 64, 3)
    assert len(rows) == 3
    return documents, rows


def test_a_step_has_rows_of_one_length_and_always_as_many_tokens(unpacked):
    documents, rows = unpacked
    batches = row_batches(documents, rows, 512, 2, seed=0)
    shapes = [batches(step).tokens.shape for step in range(40)]
    assert {shape[2] for shape in shapes} == {some.length for some in rows}
    assert {shape[0] for shape in shapes} == {2}
    assert {np.prod(shape) for shape in shapes} == {512}


def test_an_epoch_shows_every_prediction_and_each_in_its_own_order(unpacked):
    documents, rows = unpacked
    batches = row_batches(documents, rows, 512, 2, seed=0)
    steps = sum(-(-some.row_count // (512 // some.length)) for some in rows)
    for epoch in range(2):
        seen = [
            prediction
            for step in range(epoch * steps, (epoch + 1) * steps)
            for prediction in predictions_of(batches(step))
        ]
        assert sorted(set(seen)) == all_predictions(np.diff(documents.offsets))
        assert len(seen) < 1.2 * len(set(seen))
    first, second = (
        np.concatenate([batches(step).tokens.ravel() for step in range(at, at + steps)]) for at in (0, steps)
    )
    assert (first != second).any()


def test_a_batch_is_a_function_of_seed_and_step(unpacked):
    """Independent of earlier calls."""
    documents, rows = unpacked
    make = lambda seed: row_batches(documents, rows, 512, 1, seed)
    forward = [make(3)(step) for step in range(30)]
    again = make(3)
    for step in reversed(range(30)):
        for one, other in zip(forward[step], again(step), strict=True):
            np.testing.assert_array_equal(one, other)
    other = make(4)
    assert any((one.tokens.ravel() != other(step).tokens.ravel()).any() for step, one in enumerate(forward))


def test_an_evaluation_has_rows_from_everywhere():
    """Evenly spaced, including the first and the last; the last batch is padded."""
    documents = documents_of([9] * 10)
    batch = even_rows(documents, pack(documents, 8), 4, 3)
    np.testing.assert_array_equal(batch.tokens[..., 0], [[0, 27, 54], [81, 0, 0]])
    np.testing.assert_array_equal(batch.documents[..., 0], [[0, 0, 0], [0, -1, -1]])


def test_less_data_than_a_step():
    documents = documents_of([5, 4])
    batches = row_batches(documents, (pack(documents, 8),), 64, 2, seed=0)
    for step in range(3):
        assert batches(step).tokens.shape == (2, 4, 8)
        assert set(predictions_of(batches(step))) == set(all_predictions([5, 4]))
