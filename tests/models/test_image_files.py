"""What people keep beside and in their images: each file gives the pixels that its format means, or one line."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from models.data.image_files import find_images, read_images, skipped
from models.data.images import read_data
from models.data.pairs import read_pairs


def read(file: Path, patch: int, longest: int, background: str = "white") -> np.ndarray:
    return read_images([file], patch, longest, background)[0]


def png(depth: int, kind: int, width: int, rows: bytes, transparent: bytes | None = None) -> bytes:
    """A PNG of one row by the format's specification; kind 0 is gray, 2 RGB."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, kind, 0, 0, 0))
    clear = b"" if transparent is None else chunk(b"tRNS", transparent)
    return b"\x89PNG\r\n\x1a\n" + header + clear + chunk(b"IDAT", zlib.compress(b"\0" + rows)) + chunk(b"IEND", b"")


def saved(mode: str, pixels: list, form: str, **options) -> bytes:
    """One row of pixels, as Pillow writes it."""
    image, file = Image.new(mode, (len(pixels), 1)), io.BytesIO()
    for column, pixel in enumerate(pixels):
        image.putpixel((column, 0), pixel)
    image.save(file, form, **options)
    return file.getvalue()


def gray(*values: int) -> list[tuple[int, int, int]]:
    return [(value, value, value) for value in values]


PALETTE = (10, 20, 30, 200, 100, 0)


def palette(form: str, **options) -> bytes:
    image, file = Image.new("P", (2, 1)), io.BytesIO()
    image.putpalette(PALETTE)
    image.putpixel((1, 0), 1)
    image.save(file, form, **options)
    return file.getvalue()


READ = {
    "RGB of 16 bits": (png(16, 2, 1, struct.pack(">3H", 257, 1000, 65535)), [(1, 3, 255)]),
    "RGB, one clear": (png(8, 2, 2, b"\1\2\3\1\2\4", b"\0\1\0\2\0\3"), [(255, 255, 255), (1, 2, 4)]),
    "gray, alpha": (saved("LA", [(100, 51), (7, 0), (9, 255)], "PNG"), gray(224, 255, 9)),
    "RGBA": (
        saved("RGBA", [(100, 0, 200, 51), (1, 2, 3, 0), (4, 5, 6, 255)], "PNG"),
        [(224, 204, 244), (255,) * 3, (4, 5, 6)],
    ),
    "palette": (palette("PNG"), [(10, 20, 30), (200, 100, 0)]),
    "palette, alphas": (palette("PNG", transparency=b"\xff\x33"), [(10, 20, 30), (244, 224, 204)]),
    "CMYK": (saved("CMYK", [(0, 255, 255, 0), (0, 0, 0, 255)], "TIFF"), [(255, 0, 0), (0, 0, 0)]),
    "TGA, fourth bytes unused": (saved("RGBA", 9 * [(100, 0, 200, 0)], "TGA"), 9 * [(100, 0, 200)]),
}


@pytest.mark.parametrize("name", READ)
def test_white_lies_under_transparent_pixels(tmp_path, name):
    content, expected = READ[name]
    (tmp_path / "x").write_bytes(content)  # the content says what it is, not the suffix
    np.testing.assert_array_equal(read(tmp_path / "x", 1, 100), [expected])


def test_another_background(tmp_path):
    (tmp_path / "x.png").write_bytes(READ["RGBA"][0])
    pixels = read(tmp_path / "x.png", 1, 9, "rgb(0, 50, 100)")
    np.testing.assert_array_equal(pixels, [[(20, 40, 120), (0, 50, 100), (4, 5, 6)]])


@pytest.mark.parametrize("form", ["GIF", "TIFF"])
def test_the_first_frame(tmp_path, form):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "x", form, save_all=True, append_images=frames[1:])
    np.testing.assert_allclose(read(tmp_path / "x", 4, 4)[4, 4], (255, 0, 0), atol=2)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (png(16, 0, 1, struct.pack(">H", 9)), "more than 8 bits a channel"),
        (saved("F", [0.5], "TIFF"), "more than 8 bits a channel"),
        (png(16, 2, 1, struct.pack(">3H", 9, 9, 9), struct.pack(">3H", 9, 9, 9)), "transparent colour by another"),
        (png(2, 0, 4, b"\x1b", b"\0\1"), "transparent colour by another number of bits than 8"),
        (png(8, 0, 2, b"\1"), "truncated"),
        (b"", "it has no format"),
        (b"<html>404</html>", "it has no format"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, content, error):
    (tmp_path / "[x].png").write_bytes(content)
    with pytest.raises(ValueError, match=error) as raised:
        read(tmp_path / "[x].png", 1, 9)
    line = str(raised.value)
    assert line.startswith(f"{tmp_path}/[x].png cannot be read as an image: ")
    assert line.endswith("Write it as a PNG or JPEG of 8 bits, or leave it out.")
    assert "\n" not in line


STORED = np.array([[10, 20, 30], [40, 50, 60]], np.uint8)
SHOWN = {  # by the first row and first column of what is stored, as EXIF 2.3 has them in section 4.6.4
    1: STORED,
    2: STORED[:, ::-1],
    3: STORED[::-1, ::-1],
    4: STORED[::-1],
    5: STORED.T,
    6: STORED[::-1].T,
    7: STORED[::-1, ::-1].T,
    8: STORED[:, ::-1].T,
}


@pytest.mark.parametrize("orientation", SHOWN)
def test_orientations(tmp_path, orientation):
    exif, text = Image.Exif(), PngImagePlugin.PngInfo()
    exif[0x0112] = orientation
    text.add_itxt("XML:com.adobe.xmp", f'<x tiff:Orientation="{orientation}"/>')
    for form, given in (("PNG", {"exif": exif}), ("TIFF", {"exif": exif}), ("PNG", {"pnginfo": text})):
        Image.fromarray(STORED).save(tmp_path / "x", form, **given)
        np.testing.assert_array_equal(read(tmp_path / "x", 1, 9)[..., 0], SHOWN[orientation])


def exif_of(*entries: str) -> bytes:
    """An IFD with these entries, as hexadecimal digits."""
    ifd = bytes.fromhex(f"{len(entries):04x}" + "".join(entries) + "00000000")
    return b"Exif\0\0MM\0*\0\0\0\x08" + ifd


@pytest.mark.parametrize(
    ("exif", "shown"),
    [
        (exif_of("0112 0003 00000001 00060000", "0141 0002 00000002 78000000"), 6),  # a text where numbers should be
        (exif_of("0112 0003 00000001 00090000"), 1),
        (exif_of("0112 0002 00000002 36000000"), 1),  # the text "6"
        (exif_of("0112 0003 7fffffff 00060000"), 1),  # more numbers than there are bytes
        (b"Exif\0\0MM\0*\x7f\0\0\x08", 1),
    ],
)
def test_odd_exif_stops_no_picture(tmp_path, exif, shown):
    wide = np.repeat(np.repeat(STORED, 16, 0), 16, 1)  # constant where JPEG's blocks are
    for form, more in (("PNG", {}), ("JPEG", {"quality": 100})):
        Image.fromarray(wide).save(tmp_path / "x", form, exif=exif, **more)
        pixels = read(tmp_path / "x", 16, 9)[8::16, 8::16, 0].astype(int)
        np.testing.assert_allclose(pixels, SHOWN[shown], atol=1)


def save(file: Path, value: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (value, 0, 0)).save(file)


def test_what_else_is_in_a_folder(tmp_path):
    """Capitals, links and brackets are read; the rest is counted."""
    folder, elsewhere = tmp_path / "[a-b]*", tmp_path / "elsewhere"
    for name in ("0.PNG", "1.Jpg", "x.jpg/2.png", ".hidden/3.png", "[4].png"):
        save(folder / "a" / name)
    save(elsewhere / "deep" / "5.png")
    for path in ("a/.DS_Store", "a/._0.PNG", "a/notes.TXT", "a/6.heic", "a/7", "a/8.png.part", "Thumbs.db"):
        (folder / path).write_bytes(b"no image")
    (folder / "b").symlink_to(elsewhere)
    (folder / "a" / "file.png").symlink_to(elsewhere / "deep" / "5.png")
    (folder / "a" / "more").symlink_to(elsewhere)
    (folder / "a" / "loop").symlink_to(folder)
    (elsewhere / "deep" / "up").symlink_to("..")
    (folder / "empty").mkdir()
    (folder / "c").mkdir()
    (folder / "c" / "9.svg").touch()
    images, others = find_images(folder)
    assert [str(image.relative_to(folder)) for image in images] == [
        "a/0.PNG", "a/1.Jpg", "a/[4].png", "a/file.png", "a/more/deep/5.png", "a/x.jpg/2.png",
    ]  # fmt: skip
    line = skipped(others)
    assert line == (
        "not read: 1 .db, 3 hidden, 1 .heic, 1 without a suffix, 1 .part, 3 folders found again, 1 .txt, 1 .svg"
    )
    for i in range(8):
        save(folder / "a" / f"x{i}.png")
    data = read_data(str(folder), 0, 4, 64)
    assert data.classes == ("a",)
    np.testing.assert_array_equal(data.train.labels, 13 * [0])
    assert data.remark == f"{line}; no images in c, empty"


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("nowhere.png"), lambda path: path.symlink_to(path), os.mkfifo]
)
@pytest.mark.parametrize("name", ["x.png", "x"])
def test_links_to_nothing_and_pipes(tmp_path, make, name):
    for i in range(10):
        save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text("text")
    make(tmp_path / name)
    for read in (lambda: read_data(str(tmp_path), 0, 4, 64), lambda: read_pairs(str(tmp_path), 4, 64)):
        with pytest.raises(ValueError, match=rf"/{name} is no file, or a link to nothing: repair it, or remove"):
            read()
