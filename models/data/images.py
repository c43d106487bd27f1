"""Images of unequal sizes, cut into patches, in batches without padding.

From scikit-learn's digits, or a folder.
"""

import dataclasses
import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from models.data.image_files import find_images, read_images, skipped
from models.data.image_files import fitting_grid as fitting_grid
from models.data.image_files import read_image as read_image

HELDOUT_EVERY = 10
# Images that may be packed before one that no longer fits. With 1, a tenth of the budget is empty; with 32, less than 1
# %.
LOOKAHEAD = 32


class Images(NamedTuple):
    """pixels: uint8 [height, width, channels] each, with sides divisible by the patch; labels: int32."""

    pixels: list[np.ndarray]
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class DataSet:
    """Images to train on and to evaluate on, from different originals.

    Attributes:
      classes: names.
      patch: side of a patch; a token is patch * patch * channels values.
      longest: tokens of the largest image.
      sample_sizes: (height, width) of the images to draw at the end.
      remark: a line about files that were not read, or "".
    """

    train: Images
    heldout: Images
    classes: tuple[str, ...]
    patch: int
    channels: int
    longest: int
    sample_sizes: tuple[tuple[int, int], ...]
    remark: str = ""

    @functools.cached_property
    def crowd(self) -> int:
        """At most how many images start within `longest` tokens of a batch."""
        drawn = [height * width // self.patch**2 for height, width in self.sample_sizes]
        return -(
            -self.longest // min(token_counts(self.train, self.patch) + token_counts(self.heldout, self.patch) + drawn)
        )


class Batch(NamedTuple):
    """The tokens of some images, one image after another.

    Attributes:
      tokens: [T, patch * patch * channels] float32 from -1 to 1; rows after the last image are zero.
      sequence_offsets: [B + 1] int32: the start of each image, then the end of the last one. With fewer than B images
        the last ones are empty.
      grids: [B, 2] int32: rows and columns of patches; 1 by 1 for an empty image.
      labels: [B] int32.
    """

    tokens: Any
    sequence_offsets: Any
    grids: Any
    labels: Any

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
    return Batch(
        np.concatenate([*tokens, np.zeros((budget - ends[-1], patch * patch * images.pixels[0].shape[2]), np.float32)]),
        np.pad(ends, (0, empty), mode="edge").astype(np.int32),
        np.array([(image.shape[0] // patch, image.shape[1] // patch) for image in pixels] + [(1, 1)] * empty, np.int32),
        np.pad(images.labels[list(chosen)], (0, empty)).astype(np.int32),
    )


def token_counts(images: Images, patch: int) -> list[int]:
    return [image.shape[0] * image.shape[1] // patch**2 for image in images.pixels]


def sizes_of(images: Images, patch: int, budget: int) -> list[tuple[int, int]]:
    """Tokens of each image, and one image, for `next_batch`.

    Raises:
      ValueError: an image of more than `budget` tokens.
    """
    sizes = [(tokens, 1) for tokens in token_counts(images, patch)]
    for tokens, _ in sizes:
        if tokens > budget:
            raise ValueError(f"an image of {tokens} tokens does not fit into a budget of {budget}.")
    return sizes


def next_batch(waiting: deque[int], sizes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[int]:
    """Takes what a batch holds from `waiting`: the first, then each one near the front that fits.

    Args:
      waiting: numbers of images or documents, of which each one alone fits.
      sizes: of each of them, in one or several measures.
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


def every_image_once(images: Images, patch: int, budget: int, count: int) -> Iterator[tuple[list[int], Batch]]:
    """Batches of all images, each with the images' numbers in the batch's order."""
    waiting, sizes = deque(range(len(images.pixels))), sizes_of(images, patch, budget)
    while waiting:
        chosen = next_batch(waiting, sizes, (budget, count))
        yield chosen, pack(images, chosen, patch, budget, count)


def stack(batches: Sequence[Batch]) -> Batch:
    return Batch(*(np.stack(parts) for parts in zip(*batches, strict=True)))


def image_batches(
    images: Images, patch: int, budget: int, count: int, accumulate: int, seed: int
) -> Callable[[int], Batch]:
    """The batch of each step, [accumulate, ...] micro-batches that share budget and count: a function of seed and step.

    Every epoch packs all images in its own order; the few after its last full batch wait for the next epoch.
    """
    budget, count = budget // accumulate, count // accumulate
    sizes = sizes_of(images, patch, budget)
    number = len(sizes)
    # Every order has this many batches: none exceeds the budget, nor count images.
    steps = max(1, max(sum(tokens for tokens, _ in sizes) // budget, number // count) // accumulate)

    @functools.lru_cache(maxsize=2)
    def packed(epoch: int) -> list[list[int]]:
        waiting = deque(np.random.default_rng((seed, epoch)).permutation(number).tolist())
        found = []
        while waiting and len(found) < steps * accumulate:
            found.append(next_batch(waiting, sizes, (budget, count)))
        return found

    def batch(step: int) -> Batch:
        epoch, place = divmod(step, steps)
        chosen = packed(epoch)
        return stack(
            [
                pack(images, chosen[(place * accumulate + micro) % len(chosen)], patch, budget, count)
                for micro in range(accumulate)
            ]
        )

    return batch


def _multiple(rng: np.random.Generator, low: int, high: int, step: int) -> int:
    return int(rng.integers(low // step, high // step + 1)) * step


def read_digits(seed: int) -> DataSet:
    """The 1,797 handwritten digits of 8 by 8 pixels, cropped to sizes of 8 to 16; each tenth is held out."""
    from sklearn.datasets import load_digits

    (digits, labels), rng = load_digits(return_X_y=True), np.random.default_rng(seed)
    originals = (digits.reshape(-1, 8, 8) * 15.9375).astype(np.uint8)  # from 0 to 16

    def of_many_sizes(originals: np.ndarray, labels: np.ndarray, variants: int) -> Images:
        pixels = []
        for original in np.repeat(originals, variants, axis=0):
            height = _multiple(rng, 8, 16, 2)
            width = _multiple(rng, max(8, height // 3 * 2), min(16, height + 2), 2)
            above, left, more_height, more_width = rng.integers(0, 2, 4)
            resized = Image.fromarray(original).resize(
                (int(width + left + more_width), int(height + above + more_height)), Image.Resampling.BICUBIC
            )
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


DATA_SETS = {"digits": read_digits}


def read_data(name: str, seed: int, patch: int, longest: int, background: str = "white") -> DataSet:
    """A data set of DATA_SETS, or the images of a folder; patch, longest and background are for a folder.

    Raises:
      ValueError: neither, or as of `read_folder`.
    """
    if name in DATA_SETS:
        return DATA_SETS[name](seed)
    if not (name and Path(name).is_dir()):  # Path("") is the current folder
        raise ValueError(f"{name!r} is not one of {', '.join(DATA_SETS)}, and no folder of images.")
    return read_folder(Path(name), patch, longest, background)


def files_read(name: str) -> dict[str, Path]:
    """The files that `read_data` reads from a folder, by name; none for a data set of scikit-learn."""
    return {} if name in DATA_SETS else {str(file): file for file in find_images(Path(name))[0]}


def read_folder(folder: Path, patch: int, longest: int, background: str) -> DataSet:
    """The images below a folder, as of `read_images`. Each sub-folder with images is a class, or all are one class.

    Each class's tenth image is held out.

    Raises:
      ValueError: no images, fewer than ten of all classes, images beside classes, or as of `find_images` and
        `read_images`.
    """
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
    held = np.array(
        [i % HELDOUT_EVERY == HELDOUT_EVERY - 1 for found in classes.values() for i in range(len(found))], bool
    )
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
