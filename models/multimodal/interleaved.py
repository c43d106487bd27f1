"""Documents in which text and images alternate, one after another in batches without padding."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from models.data import images
from models.data.images import patchify

SEGMENTS_PER_DOCUMENT = 3  # text, image, text


class Tokens(NamedTuple):
    """The tokens that are no text: begin and end of an image, and end of a document."""

    begin: int
    end: int
    stop: int


class Document(NamedTuple):
    """Text and images in turn: int32 [length], and uint8 [height, width, channels] with sides divisible by the patch.

    The model predicts each text token from what is before it, but the first.
    """

    parts: tuple[np.ndarray, ...]
    stop: int = -1  # the token after the last part if that is text


class Room(NamedTuple):
    """Sizes of a batch, which are the same for all of them: one compiled step."""

    rows: int  # tokens and patches
    predictions: int  # of text tokens
    documents: int  # at most; three times as many runs of text or of an image's patches
    patch: int  # side of a patch
    channels: int  # of images

    @property
    def limits(self) -> tuple[int, int, int, int]:
        """What `size_of` may add up to."""
        return self.rows, self.predictions, self.documents, self.segments

    @property
    def segments(self) -> int:
        return SEGMENTS_PER_DOCUMENT * self.documents


class Batch(NamedTuple):
    """Rows of documents, one after another. A segment is a run of text or an image.

    An image that has text after it in its document is read: the model sees it as it is. Others are drawn. Of fewer than
    D documents the last ones are empty.
    """

    tokens: Any  # [T] int32; 0 in rows of images and after the last document
    patches: Any  # [T, patch * patch * channels] float32 from -1 to 1; 0 in other rows
    sequence_offsets: Any  # [D + 1] int32, where each document starts, then where the last one ends
    segment_offsets: Any  # [S + 1] int32, likewise
    is_image: Any  # [S] bool
    is_read: Any  # [S] bool
    grids: Any  # [S, 2] int32, rows and columns of patches; 1 by 1 for text
    predicting: Any  # [N] int32, the rows that predict a text token
    targets: Any  # [N] int32, those tokens; -1 for none, at the end

    def counted(self) -> Any:
        """Predicted tokens and drawn patches, summed over stacked batches, int32."""
        lengths = self.segment_offsets[..., 1:] - self.segment_offsets[..., :-1]
        drawn = (lengths * (self.is_image & ~self.is_read)).sum(dtype=np.int32)
        return drawn + (self.targets >= 0).sum(dtype=np.int32)

    @property
    def size(self) -> int:
        """Rows of all stacked batches."""
        return math.prod(self.tokens.shape)


def captioned(caption: np.ndarray, pixels: np.ndarray, tokens: Tokens) -> Document:
    """Image to caption."""
    before, after = np.array([tokens.begin], np.int32), np.array([tokens.end, *caption], np.int32)
    return Document((before, pixels, after), tokens.stop)


def illustrated(caption: np.ndarray, pixels: np.ndarray, tokens: Tokens) -> Document:
    """Caption to image; with an empty caption an image of anything."""
    return Document((np.array([*caption, tokens.begin], np.int32), pixels))


def is_image(part: np.ndarray) -> bool:
    return part.ndim == 3


def rows_of(part: np.ndarray, patch: int) -> int:
    return part.shape[0] * part.shape[1] // patch**2 if is_image(part) else len(part)


def predictions_of(document: Document) -> list[tuple[int, int, int]]:
    """(part, row in it, token) of each text token that is predicted: not a first one, nor one after an image."""
    found = []
    for number, part in enumerate(document.parts):
        if not is_image(part):
            found += [(number, row, int(token)) for row, token in enumerate(part[1:])]
    last = document.parts[-1]
    if document.stop >= 0 and not is_image(last) and len(last):
        found.append((len(document.parts) - 1, len(last) - 1, document.stop))
    return found


def size_of(document: Document, patch: int) -> tuple[int, int, int, int]:
    """Rows, predictions, documents and segments of it."""
    rows = sum(rows_of(part, patch) for part in document.parts)
    return rows, len(predictions_of(document)), 1, len(document.parts)


def lay_out(documents: Sequence[Document], room: Room) -> Batch:
    """The documents, in order, as a batch."""
    sizes = np.array([size_of(document, room.patch) for document in documents]).reshape(-1, len(room.limits)).sum(0)
    if (sizes > room.limits).any():
        raise ValueError(
            f"documents of (rows, predictions, documents, segments) {tuple(map(int, sizes))} do not fit into a batch "
            f"of {room.limits}."
        )
    batch = Batch(
        tokens=np.zeros(room.rows, np.int32),
        patches=np.zeros((room.rows, room.patch**2 * room.channels), np.float32),
        sequence_offsets=np.zeros(room.documents + 1, np.int32),
        segment_offsets=np.zeros(room.segments + 1, np.int32),
        is_image=np.zeros(room.segments, bool),
        is_read=np.zeros(room.segments, bool),
        grids=np.ones((room.segments, 2), np.int32),
        predicting=np.zeros(room.predictions, np.int32),
        targets=np.full(room.predictions, -1, np.int32),
    )
    row, segment, predictions = 0, 0, []
    for number, document in enumerate(documents):
        starts = row + np.cumsum([0, *(rows_of(part, room.patch) for part in document.parts)])
        predictions += [(starts[part] + inside, token) for part, inside, token in predictions_of(document)]
        for place, (part, (start, end)) in enumerate(
            zip(document.parts, itertools.pairwise(starts.tolist()), strict=True)
        ):
            if is_image(part):
                batch.patches[start:end] = patchify(part, room.patch)
                batch.is_image[segment] = True
                batch.is_read[segment] = place + 1 < len(document.parts)
                batch.grids[segment] = part.shape[0] // room.patch, part.shape[1] // room.patch
            else:
                batch.tokens[start:end] = part
            segment += 1
            batch.segment_offsets[segment:] = end
        row = int(starts[-1])
        batch.sequence_offsets[number + 1 :] = row
    if predictions:
        batch.predicting[: len(predictions)], batch.targets[: len(predictions)] = np.array(predictions).T
    return batch


def in_batches(together: Sequence[Sequence[Document]], order: Iterable[int], room: Room) -> list[list[int]]:
    """As of `models.data.images.in_batches`, of documents that share a batch."""
    sizes = [tuple(map(sum, zip(*(size_of(one, room.patch) for one in some), strict=True))) for some in together]
    return images.in_batches(order, sizes, room.limits, "a document of (rows, predictions, documents, segments)")


def every_document_once(documents: Sequence[Document], room: Room) -> list[tuple[list[int], Batch]]:
    """Batches of all documents, each with the documents' numbers in the batch's order."""
    chosen = in_batches([[document] for document in documents], range(len(documents)), room)
    return [(some, lay_out([documents[i] for i in some], room)) for some in chosen]


def document_batches(
    documents: Callable[[np.random.Generator], Sequence[Document]], room: Room, accumulate: int, seed: int
) -> Callable[[int], Batch]:
    """As of `models.data.images.in_epochs`, of micro-batches of `room`.

    Every epoch has its own documents, in its own order; the few after its last full batch are left out.
    """

    @functools.lru_cache(maxsize=2)
    def epoch(which: int) -> tuple[list[list[int]], Callable[[list[int]], Batch]]:
        rng = np.random.default_rng((seed, which))
        made = documents(rng)
        chosen = in_batches([[document] for document in made], rng.permutation(len(made)).tolist(), room)
        return chosen, lambda some: lay_out([made[i] for i in some], room)

    return images.in_epochs(epoch, max(1, (len(epoch(0)[0]) - 1) // accumulate), accumulate)
