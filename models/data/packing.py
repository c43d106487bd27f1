"""Documents of unequal length packed into rows of few lengths; the batch of each step by (seed, step)."""

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

SHORTEST_BUCKET = 8


class Documents(NamedTuple):
    """The tokens of documents, one after another."""

    tokens: np.ndarray  # unsigned integers
    offsets: np.ndarray  # [D + 1] int64, each start, then the last end
    scored: np.ndarray | None = None  # bool of each token, whether its prediction counts; None if all do


class Rows(NamedTuple):
    """The pieces of documents in each of R rows."""

    length: int  # predictions of a row
    starts: np.ndarray  # [P] int64: each piece's first token; its prediction is the next token of the document
    lengths: np.ndarray  # [P] int64: predictions of each piece
    first: np.ndarray  # [R + 1] int64: row r has the pieces first[r] to first[r + 1] - 1

    @property
    def row_count(self) -> int:
        return len(self.first) - 1


class Batch(NamedTuple):
    """Rows of tokens, their targets, and the document of each token: arrays [..., T]."""

    tokens: Any  # unsigned integers; zero in padding
    targets: Any  # likewise: the next token of the same document
    documents: Any  # int32, from 0 in each row; -1 for padding, which is at the end
    scored: Any = None  # bool, the targets whose predictions count; None if all but padding do

    def counts(self) -> Any:
        """Which predictions count, bool."""
        there = self.documents >= 0
        return there if self.scored is None else there & self.scored

    def counted(self) -> Any:
        """How many predictions count, int32."""
        return self.counts().sum(dtype=np.int32)

    @property
    def size(self) -> int:
        return self.documents.size


def cut(offsets: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of all documents' pieces, in order.

    A document of n tokens has n - 1 predictions, in pieces of `longest` and a remainder.
    """
    predictions = np.maximum(np.diff(offsets) - 1, 0)
    counts = -(-predictions // longest)
    document = np.repeat(np.arange(len(counts)), counts)
    before = longest * _ranges(np.zeros_like(counts), counts)
    return offsets[document] + before, np.minimum(longest, predictions[document] - before)


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """The row of each length, int64, by best fit decreasing: each piece goes to the fullest row that has room."""
    rows = np.empty(len(lengths), np.int64)
    with_room: dict[int, list[int]] = {}  # room left -> the rows that have it
    rooms: list[int] = []  # its keys, sorted
    count = 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row, left = count, room - length
            count += 1
        else:
            found = rooms[at]
            row, left = with_room[found].pop(), found - length
            if not with_room[found]:
                del with_room[found], rooms[at]
        rows[i] = row
        if left:
            if left not in with_room:
                bisect.insort(rooms, left)
                with_room[left] = []
            with_room[left].append(row)
    return rows


def pack(documents: Documents, length: int) -> Rows:
    """Rows of `length` predictions with as many documents as fit; longer documents are cut."""
    starts, lengths = cut(documents.offsets, length)
    whole = lengths == length
    rows = np.empty(len(lengths), np.int64)
    rows[whole] = np.arange(whole.sum())
    rows[~whole] = whole.sum() + best_fit(lengths[~whole], length)
    order = np.argsort(rows, kind="stable")
    first = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 2))
    return Rows(length, starts[order], lengths[order], first)


def overall_fill(rows: Sequence[Rows]) -> float:
    """The share of all rows that is not padding."""
    return float(sum(some.lengths.sum() for some in rows) / sum(some.row_count * some.length for some in rows))


def choose_buckets(lengths: np.ndarray, longest: int, most: int) -> tuple[int, ...]:
    """At most `most` of longest, longest / 2, longest / 4, ..., with the least padding of rows with one piece."""
    halves = (longest >> k for k in range(longest.bit_length()) if longest % (1 << k) == 0)
    known = sorted({longest, *(half for half in halves if half >= SHORTEST_BUCKET)})
    sizes = np.bincount(np.searchsorted(known, lengths), minlength=len(known))
    used = known[: int(np.flatnonzero(sizes).max(initial=0)) + 1]

    def padded(chosen: Sequence[int]) -> int:
        each = zip(used, sizes, strict=False)
        return sum(int(size) * chosen[bisect.bisect_left(chosen, bucket)] for bucket, size in each)

    choices = (some for count in range(most) for some in itertools.combinations(used[:-1], count))
    return min(((*some, used[-1]) for some in choices), key=padded)


def one_a_row(documents: Documents, longest: int, buckets: int) -> tuple[Rows, ...]:
    """Rows of one document, or a piece of one, in at most `buckets` lengths."""
    starts, lengths = cut(documents.offsets, longest)
    chosen = choose_buckets(lengths, longest, buckets)
    nearest = np.searchsorted(chosen, lengths)
    found = []
    for number, length in enumerate(chosen):
        mine = nearest == number
        if mine.any():
            found.append(Rows(length, starts[mine], lengths[mine], np.arange(mine.sum() + 1)))
    return tuple(found)


def build(given: Documents, rows: Rows, chosen: np.ndarray) -> Batch:
    """The rows of the given numbers [...] as a batch [..., rows.length]; -1 for a row of padding. Vectorized."""
    numbers, shape = chosen.ravel(), (*chosen.shape, rows.length)
    counts = np.where(numbers >= 0, rows.first[numbers + 1] - rows.first[numbers], 0)
    pieces = _ranges(rows.first[numbers], counts)
    lengths = rows.lengths[pieces]
    filled = np.bincount(np.repeat(np.arange(len(numbers)), counts), lengths, len(numbers)).astype(np.int64)
    into = _ranges(rows.length * np.arange(len(numbers)), filled)
    source = _ranges(rows.starts[pieces], lengths)
    size = chosen.size * rows.length

    def filled_with(values: np.ndarray, padding: int = 0) -> np.ndarray:
        found = np.full(size, padding, values.dtype)
        found[into] = values
        return found.reshape(shape)

    return Batch(
        filled_with(given.tokens[source]),
        filled_with(given.tokens[source + 1]),
        filled_with(np.repeat(_ranges(np.zeros_like(counts), counts), lengths).astype(np.int32), -1),
        None if given.scored is None else filled_with(given.scored[source + 1]),
    )


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ..., counts[0] of them, then those from starts[1]: int64."""
    return np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def row_batches(
    documents: Documents, rows: Sequence[Rows], budget: int, accumulate: int, seed: int
) -> Callable[[int], Batch]:
    """The batch of each step, [accumulate, B, length] with accumulate * B * length = budget, by seed and step.

    Every epoch has its own order of rows; a step's rows have one length. A length's last step is filled up with
    repeated rows.
    """
    each = [budget // some.length for some in rows]
    steps = [-(-some.row_count // count) for some, count in zip(rows, each, strict=True)]
    ends = np.cumsum(steps)

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        rng = np.random.default_rng((seed, epoch))
        sizes = zip(rows, steps, each, strict=True)
        shuffled = [np.resize(rng.permutation(some.row_count), (count, size)) for some, count, size in sizes]
        return rng.permutation(ends[-1]), shuffled

    def batch(step: int) -> Batch:
        epoch, place = divmod(step, int(ends[-1]))
        places, shuffled = order(epoch)
        number = int(places[place])
        bucket = int(np.searchsorted(ends, number, side="right"))
        chosen = shuffled[bucket][number - ends[bucket]]  # from the end of the bucket's steps
        return build(documents, rows[bucket], chosen.reshape(accumulate, -1))

    return batch


def even_rows(documents: Documents, rows: Rows, count: int, size: int) -> Batch:
    """At most `count` evenly spaced rows, [N, size, length], the same for every run; the last batch is padded."""
    have = rows.row_count
    chosen = np.linspace(0, have - 1, min(count, have)).astype(np.int64)
    return build(documents, rows, np.pad(chosen, (0, -len(chosen) % size), constant_values=-1).reshape(-1, size))
