"""Files of images: which ones are below a folder, and their pixels."""

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageColor, ImageOps, UnidentifiedImageError

from models.data.text_files import below

# By EXIF's orientation; 1 needs none. ImageOps.exif_transpose writes all other tags anew and fails on odd ones.
TURNS: dict[Any, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
RANGED = ("PNG", "PPM", "TIFF", "JPEG2000")  # formats that define white for more than 8 bits
BITS, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339  # tags of TIFF


def check_colour(background: str) -> None:
    """Raises a ValueError for what Pillow does not know as a colour."""
    try:
        ImageColor.getcolor(background, "RGB")
    except ValueError:
        raise ValueError(
            f"background is {background!r}, which is no colour: write a name as white, '#ffffff' or 'rgb(255,255,255)'."
        ) from None


def find_images(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files below a folder with a suffix that Pillow reads, and what else is there, such as hidden files."""
    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    images, others = [], []
    for path in below(folder):
        if path.name.startswith(".") or path.is_dir():
            others.append(path)
        elif path.is_file():
            (images if path.suffix.lower() in known else others).append(path)
        else:
            raise ValueError(f"{path} is no file, or a link to nothing: repair it, or remove it.")
    return images, others


def skipped(others: Sequence[Path], empty: Sequence[str] = ()) -> str:
    """A line about what is not read beside images, and about folders without images, or ""."""
    kind = lambda path: "folders found again" if path.is_dir() else path.suffix.lower() or "without a suffix"
    kinds = Counter("hidden" if path.name.startswith(".") else kind(path) for path in others)
    parts = [f"not read: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"] if kinds else []
    parts += [f"no images in {', '.join(empty)}"] if empty else []
    return "; ".join(parts)


def fitting_grid(height: int, width: int, patch: int, longest: int) -> tuple[int, int]:
    """Rows and columns of patches of the largest picture of `longest` tokens with nearly this aspect ratio."""
    scale = min(1.0, math.sqrt(longest * patch**2 / (height * width)))
    slack = 1e-6  # more than rounding, less than a pixel
    rows, columns = (max(1, int(side * scale / patch + slack)) for side in (height, width))
    return min(rows, longest // columns) or 1, min(columns, longest)


def read_images(files: Sequence[Path], patch: int, longest: int, background: str) -> list[np.ndarray]:
    """The first frame of each file, uint8 [height, width, 3] in RGB, with sides divisible by the patch.

    Images keep their aspect ratio: they are downscaled to at most `longest` patches, and less than a patch is cropped
    from two sides. The background is seen through transparent pixels.
    """

    def read(file: Path) -> np.ndarray:
        try:
            image = _upright(file, background)
            rows, columns = fitting_grid(image.height, image.width, patch, longest)
            return np.asarray(ImageOps.fit(image, (columns * patch, rows * patch), Image.Resampling.LANCZOS))
        except Exception as error:  # Pillow lets any through for damaged files
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, UnidentifiedImageError):
                reason = "it has no format that Pillow reads, or its header is damaged"
            raise ValueError(
                f"{file} cannot be read as an image: {reason}. Write it as a PNG or JPEG of 8 bits, or leave it out."
            ) from error

    # Pillow warns of oddities that change no pixel. Filters belong to the process, so not in each thread.
    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
        warnings.simplefilter("ignore")
        return list(pool.map(read, files))


def read_image(file: Path, patch: int, longest: int, background: str = "white") -> np.ndarray:
    """As of `read_images`."""
    return read_images([file], patch, longest, background)[0]


def _upright(file: Path, background: str) -> Image.Image:
    """In RGB."""
    # Of a stream: Pillow 13 maps a named TIFF into memory with the sides of the turned image.
    with file.open("rb") as stream, Image.open(stream) as image:
        raw = str(image.tile[0][3]) if image.format == "PNG" and image.tile else ""
        image.load()
        if (clear := image.info.get("transparency")) is not None:
            if raw == "RGB;16B":
                raise ValueError("it names a transparent colour by 16 bits, of which Pillow keeps 8")
            # Pillow widens pixels of 2 and 4 bits to 8, but not the value that is transparent.
            image.info["transparency"] = clear * {"L;2": 85, "L;4": 17}.get(raw, 1)
        turn = _turn(image)
        image = _visible(_eight_bits(image), background)
    return image if turn is None else image.transpose(turn)


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # whatever is in the tags, the picture itself has been read
        return None


def _eight_bits(image: Image.Image) -> Image.Image:
    """With at most 8 bits a channel: black stays 0, and the white of the file's format is 255."""
    tags = getattr(image, "tag_v2", {})
    signed, bits = tags.get(SAMPLE_FORMAT) == (2,), tags.get(BITS, (16,))[0]
    if image.mode[0] not in "IF" and not signed:
        return image
    values, white = np.asarray(image), 4095 if bits == 12 else 65_535
    low, high = values.min(), values.max()
    # In 32 bits Pillow and others write 8 as well as 16 bits.
    defined = image.mode != "F" and image.format in RANGED and (not signed if bits < 32 else high not in range(1, 256))
    if not (defined and 0 <= low <= high <= white):
        raise ValueError(
            f"its numbers, {low} to {high}, do not say which one is white; beyond 8 bits it needs 16 without a sign"
        )
    if tags.get(PHOTOMETRIC) == 0:  # 0 is white
        values = white - values
    # The high bits, as Pillow reads colours of 16 bits.
    gray = Image.fromarray((values.astype(np.int64) * 256 // (white + 1)).astype(np.uint8))
    if (clear := image.info.get("transparency")) is not None:
        gray.putalpha(Image.fromarray(values != clear))
    return gray


def _visible(image: Image.Image, background: str) -> Image.Image:
    """In RGB, transparent pixels over the background."""
    if image.mode == "La":
        image = image.convert("LA")
    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = image.convert("RGBA")
    if image.format == "TGA" and not shown.getchannel("A").getbbox():  # where a fourth byte is often unused
        return image.convert("RGB")
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(shown, mask=shown)
    return canvas
