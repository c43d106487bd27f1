"""Images with captions: scikit-learn's digits in words, or an own folder or .jsonl file."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from models.data.digits_in_words import captions_of
from models.data.image_files import find_images, read_images, skipped
from models.data.images import HELDOUT_EVERY, is_heldout
from models.data.text_files import check_text, is_json_lines, json_lines, read_utf8


class Pairs(NamedTuple):
    """pixels: uint8 [height, width, channels] each, with sides divisible by the patch; captions: each image's, one or
    more."""

    pixels: list[np.ndarray]
    captions: list[tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class PairData:
    """Pairs to train on and to evaluate on, of different images."""

    train: Pairs
    heldout: Pairs
    patch: int  # side of a patch
    channels: int
    labels: tuple[np.ndarray, np.ndarray] | None = None  # of digits, those of `train` and of `heldout`
    remark: str = ""  # a line about files that were not read


def read_digits() -> PairData:
    """The 1,797 handwritten digits of 8 by 8 pixels, each with all captions of `captions_of`; 224 are held out."""
    from sklearn.datasets import load_digits

    digits, labels = load_digits(return_X_y=True)
    pixels = (digits.reshape(-1, 8, 8, 1) * 15.9375).astype(np.uint8)  # from 0 to 16
    held = is_heldout(len(labels), 8)
    of = lambda which: Pairs(list(pixels[which]), [captions_of(int(label)) for label in labels[which]])
    return PairData(of(~held), of(held), 2, 1, (labels[~held], labels[held]))


DATA_SETS: dict[str, Callable[[], PairData]] = {"digits": read_digits}


def read_pairs(name: str, patch: int, longest: int, background: str = "white") -> PairData:
    """A data set of DATA_SETS, or pairs of a folder or a .jsonl file, as of `read_images`. Each tenth is held out."""
    if name in DATA_SETS:
        return DATA_SETS[name]()
    found = list(_find(name))
    if len(found) < HELDOUT_EVERY:
        raise ValueError(f"{name} has {len(found)} pairs of image and caption; of {HELDOUT_EVERY} one can be held out.")
    pixels = read_images([image for image, _ in found], patch, longest, background)
    held = is_heldout(len(found))
    of = lambda which: Pairs([pixels[i] for i in which], [(found[i][1],) for i in which])
    others = find_images(Path(name))[1] if Path(name).is_dir() else []
    remark = skipped([file for file in others if not _is_caption(file)])
    return PairData(of(np.flatnonzero(~held)), of(np.flatnonzero(held)), patch, 3, remark=remark)


def files_read(name: str) -> dict[str, Path]:
    """The files that `read_pairs` reads, by name; none for a data set of scikit-learn."""
    if name in DATA_SETS:
        return {}
    path = Path(name)
    if path.is_dir():
        images, others = find_images(path)
        return {str(file): file for file in [*images, *filter(_is_caption, others)]}
    return {str(file): file for file in [path, *(image for image, _ in _find(name))]}


def _find(name: str) -> Iterator[tuple[Path, str]]:
    """Files of images with their captions."""
    path = Path(name)
    if path.is_file() and is_json_lines(path):
        return _lines(path)
    if name and path.is_dir():  # Path("") is the current folder
        return _beside(path)
    raise ValueError(
        f"{name!r} is not one of {', '.join(DATA_SETS)}, no folder of images with a .txt each, and no .jsonl file."
    )


def _beside(folder: Path) -> Iterator[tuple[Path, str]]:
    """The images below a folder, with the text of the .txt of the same name."""
    images, others = find_images(folder)
    named = _by_name(images, "have one caption: give them other names")
    texts = _by_name(filter(_is_caption, reversed(others)), "are captions of one image: remove one")
    if alone := sorted(set(named) - set(texts)):
        raise ValueError(f"{named[alone[0]]} has no caption: {alone[0].name}.txt is missing{_more(alone)}.")
    if alone := sorted(set(texts) - set(named)):
        raise ValueError(f"{texts[alone[0]]} is the caption of no image{_more(alone)}.")
    for name, image in named.items():
        yield image, _checked(read_utf8(texts[name], zeros=True).decode(), str(texts[name]))


def _by_name(files: Iterable[Path], why: str) -> dict[Path, Path]:
    """The files by their paths without suffix."""
    found: dict[Path, Path] = {}
    for file in files:
        if (first := found.setdefault(file.with_suffix(""), file)) is not file:
            raise ValueError(f"{first} and {file.name} {why}.")
    return found


def _is_caption(file: Path) -> bool:
    return file.suffix.lower() == ".txt" and not file.name.startswith(".") and file.is_file()


def _lines(file: Path) -> Iterator[tuple[Path, str]]:
    """Of each line "image", a path from the file's folder, and "text"."""
    for line in json_lines(file, 'an "image" and a "text" that are strings'):
        image, text = line.text("image"), line.text("text")
        if not (path := file.parent / image).is_file():
            raise ValueError(f"{line.source}: there is no image {path}.")
        yield path, _checked(text, line.source)


def _checked(caption: str, where: str) -> str:
    if not (caption := caption.strip()):
        raise ValueError(f"{where}: the caption is empty.")
    return check_text(caption, f"{where}: the caption")


def _more(files: Sequence[Path]) -> str:
    return f", and {len(files) - 1} more" if len(files) > 1 else ""
