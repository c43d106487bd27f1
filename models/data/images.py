"""Images of unequal sizes, cut into patches, in batches without padding.

From scikit-learn's digits, or a folder.
"""

import dataclasses
import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from PIL import Image

from models.data.image_files import find_images, read_images, skipped

HELDOUT_EVERY = 10
AnyBatch = TypeVar("AnyBatch")
# Images that may be packed before one that no longer fits. With 1, a tenth of the budget is empty; with 32, less than a
# hundredth.
LOOKAHEAD = 32


class Images(NamedTuple):
    """pixels: uint8 [height, width, channels] each, with sides divisible by the patch; labels: int32."""

    pixels: list[np.ndarray]
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class DataSet:
    """Images to train on and to evaluate on, from different originals."""

    train: Images
    heldout: Images
    classes: tuple[str, ...]
    patch: int  # side of a patch; a token is patch * patch * channels values
    channels: int
    longest: int  # tokens of the largest image
    sample_sizes: tuple[tuple[int, int], ...]  # (height, width) of the images to draw at the end
    remark: str = ""  # a line about files that were not read


class Batch(NamedTuple):
    """The tokens of some images, one image after another. With fewer than B images the last ones are empty."""

    tokens: Any  # [T, patch * patch * channels] float32 from -1 to 1; rows after the last image are zero
    sequence_offsets: Any  # [B + 1] int32: the start of each image, then the end of the last one
    grids: Any  # [B, 2] int32: rows and columns of patches; 1 by 1 for an empty image
    labels: Any  # [B] int32

    def counted(self) -> Any:
        """Rows of images, summed over stacked batches, int32."""
        return (self.sequence_offsets[..., -1] - self.sequence_offsets[..., 0]).sum(dtype=np.int32)

    @property
    def size(self) -> int:
        """Rows of all stacked batches."""
        return math.prod(self.tokens.shape[:-1])


def patchify(pixels: np.ndarray, patch: int) -> np.ndarray:
    """uint8 [height, width, channels] -> float32 [tokens, patch * patch * channels] from -1 to 1, row by row."""
    height, width, channels = pixels.shape
    cut = pixels.reshape(height // patch, patch, width // patch, patch, channels).swapaxes(1, 2)
    return cut.reshape(-1, patch * patch * channels).astype(np.float32) / 127.5 - 1


def unpatchify(tokens: np.ndarray, grid: Sequence[int], patch: int) -> np.ndarray:
    """The inverse of `patchify`; values are clipped to -1 and 1."""
    rows, columns = grid
    cut = tokens.reshape(rows, columns, patch, patch, -1).swapaxes(1, 2)
    return np.rint((np.clip(cut.reshape(rows * patch, columns * patch, -1), -1, 1) + 1) * 127.5).astype(np.uint8)


def pack(images: Images, chosen: Sequence[int], patch: int, budget: int, count: int) -> Batch:
    """The chosen images in a batch of `budget` tokens and `count` images."""
    pixels = [images.pixels[i] for i in chosen]
    tokens = [patchify(image, patch) for image in pixels]
    ends = np.cumsum([0, *(len(t) for t in tokens)])
    if len(chosen) > count or ends[-1] > budget:
        raise ValueError(
            f"{len(chosen)} images of {ends[-1]} tokens do not fit into a batch of {count} images and {budget} tokens."
        )
    empty = count - len(chosen)
    padding = np.zeros((budget - ends[-1], patch * patch * images.pixels[0].shape[2]), np.float32)
    grids = [(image.shape[0] // patch, image.shape[1] // patch) for image in pixels] + [(1, 1)] * empty
    return Batch(
        np.concatenate([*tokens, padding]),
        np.pad(ends, (0, empty), mode="edge").astype(np.int32),
        np.array(grids, np.int32),
        np.pad(images.labels[list(chosen)], (0, empty)).astype(np.int32),
    )


def token_counts(images: Images, patch: int) -> list[int]:
    return [image.shape[0] * image.shape[1] // patch**2 for image in images.pixels]


def next_batch(waiting: deque[int], sizes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[int]:
    """Takes what a batch holds from `waiting`, numbers of images or documents: the first, then each near it that fits.

    Args:
      sizes: of each of them, in one or several measures. Each one alone fits.
      limits: what a batch's sizes may add up to, in these measures.
    """
    taken, passed, room = [], [], list(limits)
    while waiting and len(passed) < LOOKAHEAD:
        i = waiting.popleft()
        if all(size <= left for size, left in zip(sizes[i], room, strict=True)):
            taken.append(i)
            room = [left - size for left, size in zip(room, sizes[i], strict=True)]
        else:
            passed.append(i)
    waiting.extendleft(reversed(passed))
    return taken


def in_batches(
    order: Iterable[int], sizes: Sequence[Sequence[int]], limits: Sequence[int], what: str
) -> list[list[int]]:
    """All numbers of `order` in batches, as of `next_batch`; what: one of them and its measures, for the error."""
    for size in sizes:
        if any(have > most for have, most in zip(size, limits, strict=True)):
            raise ValueError(f"{what} {tuple(size)} does not fit into a batch of {tuple(limits)}.")
    waiting, found = deque(order), []
    while waiting:
        found.append(next_batch(waiting, sizes, limits))
    return found


def stack(batches: Sequence[AnyBatch]) -> AnyBatch:
    """Batches of equal shapes as one, with a leading axis."""
    return jax.tree.map(lambda *parts: np.stack(parts), *batches)


def _in_batches(images: Images, order: Iterable[int], patch: int, budget: int, count: int) -> list[list[int]]:
    sizes = [(tokens, 1) for tokens in token_counts(images, patch)]
    return in_batches(order, sizes, (budget, count), "an image of (tokens, images)")


def every_image_once(images: Images, patch: int, budget: int, count: int) -> Iterator[tuple[list[int], Batch]]:
    """Batches of all images, each with the images' numbers in the batch's order."""
    for chosen in _in_batches(images, range(len(images.pixels)), patch, budget, count):
        yield chosen, pack(images, chosen, patch, budget, count)


def image_batches(
    images: Images, patch: int, budget: int, count: int, accumulate: int, seed: int
) -> Callable[[int], Batch]:
    """As of `in_epochs`, of micro-batches that share budget and count.

    Every epoch packs all images in its own order; the few after its last full batch wait for the next epoch.
    """
    budget, count = budget // accumulate, count // accumulate
    number = len(images.pixels)
    # Every order has this many batches: none exceeds the budget, nor count images.
    steps = max(1, max(sum(token_counts(images, patch)) // budget, number // count) // accumulate)

    @functools.lru_cache(maxsize=2)
    def epoch(which: int) -> tuple[list[list[int]], Callable[[list[int]], Batch]]:
        order = np.random.default_rng((seed, which)).permutation(number).tolist()
        chosen = _in_batches(images, order, patch, budget, count)[: steps * accumulate]
        return chosen, lambda some: pack(images, some, patch, budget, count)

    return in_epochs(epoch, steps, accumulate)


def in_epochs(
    epoch: Callable[[int], tuple[list[list[int]], Callable[[list[int]], AnyBatch]]], steps: int, accumulate: int
) -> Callable[[int], AnyBatch]:
    """The batch of each step, [accumulate, ...] micro-batches.

    Args:
      epoch: from an epoch's number its micro-batches, as numbers of images or documents, and the function that lays
        these out. An epoch with too few of them begins again.
      steps: of an epoch.
    """

    def batch(step: int) -> AnyBatch:
        which, place = divmod(step, steps)
        chosen, lay_out = epoch(which)
        places = range(place * accumulate, (place + 1) * accumulate)
        return stack([lay_out(chosen[i % len(chosen)]) for i in places])

    return batch


def is_heldout(count: int, every: int = HELDOUT_EVERY) -> np.ndarray:
    """The last one of each `every`, bool [count]."""
    return np.arange(count) % every == every - 1


def read_digits(seed: int) -> DataSet:
    """The 1,797 handwritten digits of 8 by 8 pixels, cropped to sizes of 8 to 16; each tenth is held out."""
    from sklearn.datasets import load_digits

    (digits, labels), rng = load_digits(return_X_y=True), np.random.default_rng(seed)
    originals = (digits.reshape(-1, 8, 8) * 15.9375).astype(np.uint8)  # from 0 to 16
    even = lambda low, high: 2 * int(rng.integers(low // 2, high // 2 + 1))

    def of_many_sizes(originals: np.ndarray, labels: np.ndarray, variants: int) -> Images:
        pixels = []
        for original in np.repeat(originals, variants, axis=0):
            height = even(8, 16)
            width = even(max(8, height // 3 * 2), min(16, height + 2))
            above, left, more_height, more_width = rng.integers(0, 2, 4)
            size = int(width + left + more_width), int(height + above + more_height)
            resized = Image.fromarray(original).resize(size, Image.Resampling.BICUBIC)
            pixels.append(np.asarray(resized)[above : above + height, left : left + width, None])
        return Images(pixels, np.repeat(labels, variants).astype(np.int32))

    held = is_heldout(len(labels))
    return DataSet(
        of_many_sizes(originals[~held], labels[~held], 12),
        of_many_sizes(originals[held], labels[held], 1),
        classes=tuple("0123456789"),
        patch=2,
        channels=1,
        longest=64,
        sample_sizes=((16, 16), (16, 12), (14, 12), (12, 12), (12, 10), (10, 8)),
    )


DATA_SETS = {"digits": read_digits}


def read_data(name: str, seed: int, patch: int, longest: int, background: str = "white") -> DataSet:
    """A data set of DATA_SETS, or the images of a folder; patch, longest and background are for a folder."""
    if name in DATA_SETS:
        return DATA_SETS[name](seed)
    if not (name and Path(name).is_dir()):  # Path("") is the current folder
        raise ValueError(f"{name!r} is not one of {', '.join(DATA_SETS)}, and no folder of images.")
    return read_folder(Path(name), patch, longest, background)


def files_read(name: str) -> dict[str, Path]:
    """The files that `read_data` reads from a folder, by name; none for a data set of scikit-learn."""
    return {} if name in DATA_SETS else {str(file): file for file in find_images(Path(name))[0]}


def read_folder(folder: Path, patch: int, longest: int, background: str) -> DataSet:
    """The images below a folder, each sub-folder being a class, or all being one. Each class's tenth is held out."""
    files, others = find_images(folder)
    classes: dict[str, list[Path]] = {}
    for file in files:
        first, *rest = file.relative_to(folder).parts
        classes.setdefault(first if rest else "", []).append(file)
    alone = classes.pop("", [])
    if alone and classes:
        raise ValueError(
            f"{folder} has images, as {alone[0].name}, beside folders of images, as {', '.join(list(classes)[:5])}; "
            "write one folder a class."
        )
    subfolders = [path for path in sorted(folder.iterdir()) if path.is_dir() and path not in others]
    remark = skipped(others, [path.name for path in subfolders if path.name not in classes])
    classes = classes or {folder.resolve().name: alone}
    held = np.concatenate([np.empty(0, bool), *(is_heldout(len(found)) for found in classes.values())])
    if not held.any():
        raise ValueError(
            f"{folder} has {len(files)} images; of {HELDOUT_EVERY} in a class, one can be held out. {remark}".strip()
        )
    pixels = read_images(files, patch, longest, background)
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(found) for found in classes.values()])
    train, heldout = (Images([pixels[i] for i in np.flatnonzero(which)], labels[which]) for which in (~held, held))
    sizes = Counter(image.shape[:2] for image in train.pixels).most_common(6)
    sample_sizes = tuple(sorted((size for size, _ in sizes), reverse=True))
    return DataSet(train, heldout, tuple(classes), patch, 3, longest, sample_sizes, remark)
