"""Images of unequal sizes, and batches of them without padding: scikit-learn's bundled digits and photographs, cut into patches."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

HELDOUT_EVERY = 10
# Images that may go before the one that no longer fits. With one, a tenth of the budget stays empty; with 32, less than a hundredth.
LOOKAHEAD = 32


class Images(NamedTuple):
    """pixels: uint8 [height, width, channels] each, sides multiples of the data set's patch; labels: int32."""

    pixels: list[np.ndarray]
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class DataSet:
    """Images to train on and to evaluate on, from different originals.

    Attributes:
      classes: their names.
      patch: side of a patch; a token is patch * patch * channels values.
      longest: tokens of the largest image there can be.
      sample_sizes: (height, width) of the images to draw at the end.
    """

    train: Images
    heldout: Images
    classes: tuple[str, ...]
    patch: int
    channels: int
    longest: int
    sample_sizes: tuple[tuple[int, int], ...]


class Batch(NamedTuple):
    """Some images' tokens, one image after another.

    Attributes:
      tokens: [T, patch * patch * channels] float32 within -1 to 1; rows after the last image are zero.
      sequence_offsets: [B + 1] int32: where each image starts, then where the last one ends. Where there are fewer than B, the last are empty.
      grids: [B, 2] int32: rows and columns of patches; 1 by 1 for an empty image.
      labels: [B] int32.
    """

    tokens: np.ndarray
    sequence_offsets: np.ndarray
    grids: np.ndarray
    labels: np.ndarray


def patchify(pixels: np.ndarray, patch: int) -> np.ndarray:
    """uint8 [height, width, channels] -> float32 [tokens, patch * patch * channels] within -1 to 1, patches row by row."""
    height, width, channels = pixels.shape
    cut = pixels.reshape(height // patch, patch, width // patch, patch, channels).swapaxes(1, 2)
    return cut.reshape(-1, patch * patch * channels).astype(np.float32) / 127.5 - 1


def unpatchify(tokens: np.ndarray, grid: Sequence[int], patch: int) -> np.ndarray:
    """The inverse of `patchify`; values past -1 or 1 are cut."""
    rows, columns = grid
    cut = tokens.reshape(rows, columns, patch, patch, -1).swapaxes(1, 2)
    return np.rint((np.clip(cut.reshape(rows * patch, columns * patch, -1), -1, 1) + 1) * 127.5).astype(np.uint8)


def pack(images: Images, chosen: Sequence[int], patch: int, budget: int, count: int) -> Batch:
    """The chosen images in a batch of `budget` tokens and `count` images."""
    pixels = [images.pixels[i] for i in chosen]
    tokens = [patchify(image, patch) for image in pixels]
    ends = np.cumsum([0, *(len(t) for t in tokens)])
    if len(chosen) > count or ends[-1] > budget:
        raise ValueError(f"{len(chosen)} images of {ends[-1]} tokens do not fit into a batch of {count} images and {budget} tokens.")
    empty = count - len(chosen)
    return Batch(
        np.concatenate([*tokens, np.zeros((budget - ends[-1], patch * patch * images.pixels[0].shape[2]), np.float32)]),
        np.pad(ends, (0, empty), mode="edge").astype(np.int32),
        np.array([(image.shape[0] // patch, image.shape[1] // patch) for image in pixels] + [(1, 1)] * empty, np.int32),
        np.pad(images.labels[list(chosen)], (0, empty)).astype(np.int32),
    )


def token_counts(images: Images, patch: int) -> list[int]:
    return [image.shape[0] * image.shape[1] // patch**2 for image in images.pixels]


def next_batch(waiting: deque[int], lengths: Sequence[int], budget: int, count: int) -> list[int]:
    """Takes from `waiting` the images of one batch: the first, and then each one near the front that still fits."""
    if lengths[waiting[0]] > budget:
        raise ValueError(f"an image of {lengths[waiting[0]]} tokens does not fit into a budget of {budget}.")
    taken, passed, room = [], [], budget
    while waiting and len(taken) < count and len(passed) < LOOKAHEAD:
        i = waiting.popleft()
        if lengths[i] <= room:
            taken.append(i)
            room -= lengths[i]
        else:
            passed.append(i)
    waiting.extendleft(reversed(passed))
    return taken


def every_image_once(images: Images, patch: int, budget: int, count: int) -> Iterator[tuple[list[int], Batch]]:
    """Batches of all images, each with the images' numbers in the batch's order."""
    waiting, lengths = deque(range(len(images.pixels))), token_counts(images, patch)
    while waiting:
        chosen = next_batch(waiting, lengths, budget, count)
        yield chosen, pack(images, chosen, patch, budget, count)


def endless_batches(images: Images, patch: int, budget: int, count: int, seed: int) -> Iterator[Batch]:
    """Shuffled again in every epoch; what does not fit into an epoch's last batch goes into the next epoch's first."""
    rng, waiting, lengths = np.random.default_rng(seed), deque(), token_counts(images, patch)
    while True:
        while len(waiting) < count + LOOKAHEAD:
            waiting.extend(rng.permutation(len(images.pixels)).tolist())
        yield pack(images, next_batch(waiting, lengths, budget, count), patch, budget, count)


def _multiple(rng: np.random.Generator, low: int, high: int, step: int) -> int:
    return int(rng.integers(low // step, high // step + 1)) * step


def read_digits(seed: int) -> DataSet:
    """The 1,797 handwritten digits of 8 by 8 pixels, each resized and cropped to several sizes of 8 to 16; each tenth is held out."""
    from sklearn.datasets import load_digits

    (digits, labels), rng = load_digits(return_X_y=True), np.random.default_rng(seed)
    originals = (digits.reshape(-1, 8, 8) * 15.9375).astype(np.uint8)  # from 0 to 16

    def of_many_sizes(originals: np.ndarray, labels: np.ndarray, variants: int) -> Images:
        pixels = []
        for original in np.repeat(originals, variants, axis=0):
            height = _multiple(rng, 8, 16, 2)
            width = _multiple(rng, max(8, height // 3 * 2), min(16, height + 2), 2)
            above, left, more_height, more_width = rng.integers(0, 2, 4)
            resized = Image.fromarray(original).resize((int(width + left + more_width), int(height + above + more_height)), Image.Resampling.BICUBIC)
            pixels.append(np.asarray(resized)[above : above + height, left : left + width, None])
        return Images(pixels, np.repeat(labels, variants).astype(np.int32))

    held = np.arange(len(labels)) % HELDOUT_EVERY == HELDOUT_EVERY - 1
    return DataSet(
        of_many_sizes(originals[~held], labels[~held], 12),
        of_many_sizes(originals[held], labels[held], 1),
        classes=tuple("0123456789"),
        patch=2,
        channels=1,
        longest=64,
        sample_sizes=((16, 16), (16, 12), (14, 12), (12, 12), (12, 10), (10, 8)),
    )


def read_photos(seed: int) -> DataSet:
    """Crops of 16 to 32 pixels from the two photographs, made smaller; the right-hand fifth of each is held out."""
    from sklearn.datasets import load_sample_images

    data, rng, scale, patch = load_sample_images(), np.random.default_rng(seed), 6, 4
    smaller = [np.asarray(Image.fromarray(photo).resize((photo.shape[1] // scale, photo.shape[0] // scale), Image.Resampling.BOX)) for photo in data.images]

    def crops(parts: list[np.ndarray], count: int) -> Images:
        pixels, labels = [], rng.integers(0, len(parts), count).astype(np.int32)
        for label in labels:
            part = parts[label]
            height, width = _multiple(rng, 16, 32, patch), _multiple(rng, 16, min(32, part.shape[1]), patch)
            top, left = (int(rng.integers(0, room + 1)) for room in (part.shape[0] - height, part.shape[1] - width))
            pixels.append(part[top : top + height, left : left + width])
        return Images(pixels, labels)

    cuts = [photo.shape[1] * 4 // 5 for photo in smaller]
    return DataSet(
        crops([photo[:, :cut] for photo, cut in zip(smaller, cuts, strict=True)], 8_000),
        crops([photo[:, cut:] for photo, cut in zip(smaller, cuts, strict=True)], 200),
        classes=("china", "flower"),
        patch=patch,
        channels=3,
        longest=64,
        sample_sizes=((32, 32), (32, 24), (24, 32), (24, 24), (16, 32), (16, 16)),
    )


DATA_SETS = {"digits": read_digits, "photos": read_photos}
