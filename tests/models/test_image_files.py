"""What people keep beside and in their images: each file gives the pixels that its format means, or one line."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from models.data.image_files import find_images, read_image, read_images, skipped
from models.data.images import read_data
from models.data.pairs import read_pairs


def png(depth: int, kind: int, width: int, rows: bytes, transparent: bytes | None = None) -> bytes:
    """A PNG of one row by the format's specification; kind 0 is gray, 2 RGB."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, kind, 0, 0, 0))
    clear = b"" if transparent is None else chunk(b"tRNS", transparent)
    return b"\x89PNG\r\n\x1a\n" + header + clear + chunk(b"IDAT", zlib.compress(b"\0" + rows)) + chunk(b"IEND", b"")


def tiff(
    bits: int, sample_format: int, row: bytes, *, white_is_zero=False, order="<", alpha: int | None = None
) -> bytes:
    """A TIFF of two pixels by the format's specification; alpha: 1 for premultiplied, 2 for separate."""
    channels = 1 if alpha is None else 2
    tags = {256: (4, 2), 257: (4, 1), 258: (3, *channels * [bits]), 259: (3, 1), 262: (3, int(not white_is_zero))}
    tags |= {273: (4, 0), 277: (3, channels), 278: (4, 1), 279: (4, len(row)), 339: (3, *channels * [sample_format])}
    tags |= {} if alpha is None else {338: (3, alpha)}
    tags[273] = (4, 8 + 2 + 12 * len(tags) + 4)
    entry = lambda tag, kind, *values: (
        struct.pack(order + "HHI", tag, kind, len(values))
        + struct.pack(order + str(len(values)) + {3: "H", 4: "I"}[kind], *values).ljust(4, b"\0")
    )
    ifd = b"".join(entry(tag, *tags[tag]) for tag in sorted(tags))
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(tags))
    return start + ifd + struct.pack(order + "I", 0) + row


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
    "16 bits": (png(16, 0, 4, struct.pack(">4H", 0, 1000, 32768, 65535)), gray(0, 3, 128, 255)),
    "16 bits, one clear": (png(16, 0, 3, struct.pack(">3H", 999, 1000, 65535), b"\x03\xe8"), gray(3, 255, 255)),
    "2 bits, one clear": (png(2, 0, 4, b"\x1b", b"\0\1"), gray(0, 255, 170, 255)),
    "RGB, one clear": (png(8, 2, 2, b"\1\2\3\1\2\4", b"\0\1\0\2\0\3"), [(255, 255, 255), (1, 2, 4)]),
    "gray, alpha": (saved("LA", [(100, 51), (7, 0), (9, 255)], "PNG"), gray(224, 255, 9)),
    "RGBA": (
        saved("RGBA", [(100, 0, 200, 51), (1, 2, 3, 0), (4, 5, 6, 255)], "PNG"),
        [(224, 204, 244), (255,) * 3, (4, 5, 6)],
    ),
    "palette": (palette("PNG"), [(10, 20, 30), (200, 100, 0)]),
    "palette, alphas": (palette("PNG", transparency=b"\xff\x33"), [(10, 20, 30), (244, 224, 204)]),
    "TIFF, 16 bits": (tiff(16, 1, struct.pack("<2H", 257, 65535)), gray(1, 255)),
    "TIFF, 16 bits, white is 0": (tiff(16, 1, struct.pack("<2H", 257, 65535), white_is_zero=True), gray(254, 0)),
    "TIFF, 12 bits": (tiff(12, 1, b"\xff\xf1\x01"), gray(255, 16)),  # 4095 and 257, by 16
    "TIFF, 16 bits in 32": (tiff(32, 2, struct.pack("<2i", 257, 65535)), gray(1, 255)),
    "TIFF, alpha": (tiff(8, 1, b"\x64\x33\0\xff", alpha=2), gray(224, 0)),
    "TIFF, premultiplied": (tiff(8, 1, b"\x14\x33\0\xff", alpha=1), gray(224, 0)),  # 20 + 255 * (255 - 51) / 255
    "CMYK": (saved("CMYK", [(0, 255, 255, 0), (0, 0, 0, 255)], "TIFF"), [(255, 0, 0), (0, 0, 0)]),
    "PGM to 65535": (b"P5 2 1 65535\n" + struct.pack(">2H", 257, 65535), gray(1, 255)),
    "TGA, fourth bytes unused": (saved("RGBA", 9 * [(100, 0, 200, 0)], "TGA"), 9 * [(100, 0, 200)]),
}


@pytest.mark.parametrize("name", READ)
def test_numbers_keep_their_range_and_white_lies_under_transparent_pixels(tmp_path, name):
    content, expected = READ[name]
    (tmp_path / "x").write_bytes(content)  # the content says what it is, not the suffix
    np.testing.assert_array_equal(read_image(tmp_path / "x", 1, 100), [expected])


def test_another_background(tmp_path):
    (tmp_path / "x.png").write_bytes(saved("RGBA", [(100, 0, 200, 51), (1, 2, 3, 0), (4, 5, 6, 255)], "PNG"))
    pixels = read_image(tmp_path / "x.png", 1, 9, background="rgb(0, 50, 100)")
    np.testing.assert_array_equal(pixels, [[(20, 40, 120), (0, 50, 100), (4, 5, 6)]])


@pytest.mark.parametrize("form", ["GIF", "TIFF"])
def test_the_first_frame(tmp_path, form):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "x", form, save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / "x") as image:
        assert image.n_frames == 2  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_allclose(read_image(tmp_path / "x", 4, 4)[4, 4], (255, 0, 0), atol=2)


NO_WHITE = r"do not say which one is white; beyond 8 bits it needs 16 without a sign"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (tiff(32, 3, struct.pack("<2f", 0.5, 1)), rf"its numbers, 0\.5 to 1\.0, {NO_WHITE}"),
        (tiff(16, 2, struct.pack("<2h", 5, 1000)), f"its numbers, 5 to 1000, {NO_WHITE}"),
        (tiff(32, 2, struct.pack("<2i", 0, 65536)), f"its numbers, 0 to 65536, {NO_WHITE}"),
        (tiff(32, 2, struct.pack("<2i", 0, 255)), f"its numbers, 0 to 255, {NO_WHITE}"),  # of 8 bits, or very dark
        (png(16, 2, 1, struct.pack(">3H", 9, 9, 9), struct.pack(">3H", 9, 9, 9)), "transparent colour by 16 bits"),
        (png(8, 0, 2, b"\1"), "truncated"),
        (b"", "it has no format"),
        (b"<html>404</html>", "it has no format"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, content, error):
    (tmp_path / "[x].png").write_bytes(content)
    with pytest.raises(ValueError, match=error) as raised:
        read_images([tmp_path / "[x].png"], 1, 9, "white")
    line = str(raised.value)
    assert line.startswith(f"{tmp_path}/[x].png cannot be read as an image: ")
    assert line.endswith("Write it as a PNG or JPEG of 8 bits, or leave it out.")
    assert "\n" not in line


def test_a_file_that_must_not_be_read(tmp_path, monkeypatch):
    def refuse(file, *_):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"x\.png cannot be read as an image: Permission denied\. Write"):
        read_image(tmp_path / "x.png", 1, 9)


STORED = np.array([[10, 20, 30], [40, 50, 60]], np.uint8)
SHOWN = {  # by the first row and first column of what is stored, as EXIF 2.3 has them in section 4.6.4
    1: [[10, 20, 30], [40, 50, 60]],
    2: [[30, 20, 10], [60, 50, 40]],
    3: [[60, 50, 40], [30, 20, 10]],
    4: [[40, 50, 60], [10, 20, 30]],
    5: [[10, 40], [20, 50], [30, 60]],
    6: [[40, 10], [50, 20], [60, 30]],
    7: [[60, 30], [50, 20], [40, 10]],
    8: [[30, 60], [20, 50], [10, 40]],
}


@pytest.mark.parametrize("form", ["PNG", "TIFF", "XMP"])
@pytest.mark.parametrize("orientation", SHOWN)
def test_orientations(tmp_path, form, orientation):
    exif, text = Image.Exif(), PngImagePlugin.PngInfo()
    exif[0x0112] = orientation
    text.add_itxt("XML:com.adobe.xmp", f'<x tiff:Orientation="{orientation}"/>')
    given = {"pnginfo": text} if form == "XMP" else {"exif": exif}
    Image.fromarray(STORED).save(tmp_path / "x", "PNG" if form == "XMP" else form, **given)
    np.testing.assert_array_equal(read_image(tmp_path / "x", 1, 9)[..., 0], SHOWN[orientation])


def exif_of(*entries: str) -> bytes:
    """An IFD with these entries, as hexadecimal digits."""
    ifd = bytes.fromhex(f"{len(entries):04x}" + "".join(entries) + "00000000")
    return b"Exif\0\0MM\0*\0\0\0\x08" + ifd


@pytest.mark.parametrize(
    ("exif", "shown"),
    [
        (exif_of("0112 0003 00000001 00060000", "0141 0002 00000002 78000000"), 6),  # a text where numbers should be
        (exif_of("0112 0004 00000001 00000003"), 3),  # of 32 bits
        (exif_of("0112 0003 00000001 00090000"), 1),
        (exif_of("0112 0002 00000002 36000000"), 1),  # the text "6"
        (exif_of("0112 0003 7fffffff 00060000"), 1),  # more numbers than there are bytes
        (b"Exif\0\0MM\0*\x7f\0\0\x08", 1),
    ],
)
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_odd_exif_stops_no_picture(tmp_path, form, exif, shown):
    wide = np.repeat(np.repeat(STORED, 16, 0), 16, 1)  # constant where JPEG's blocks are
    given = {"quality": 100} if form == "JPEG" else {}
    Image.fromarray(wide).save(tmp_path / "x", form, exif=exif, **given)
    pixels = read_image(tmp_path / "x", 16, 9)[8::16, 8::16, 0].astype(int)
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
    ("make", "error"),
    [
        (lambda path: path.symlink_to("nowhere.png"), "is no file, or a link to nothing: repair it, or remove it"),
        (lambda path: path.symlink_to(path), "is no file, or a link to nothing"),
        (os.mkfifo, "is no file, or a link to nothing"),
    ],
)
@pytest.mark.parametrize("name", ["x.png", "x"])
def test_links_to_nothing_and_pipes(tmp_path, make, error, name):
    for i in range(10):
        save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text("text")
    make(tmp_path / name)
    for read in (lambda: read_data(str(tmp_path), 0, 4, 64), lambda: read_pairs(str(tmp_path), 4, 64)):
        with pytest.raises(ValueError, match=rf"/{name} {error}"):
            read()


def test_a_folder_that_must_not_be_listed(tmp_path, monkeypatch):
    save(tmp_path / "a" / "b" / "0.png")
    allowed = Path.iterdir

    def iterdir(path):
        if path.name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return allowed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(PermissionError, match=r"a/b cannot be read: Permission denied\. Allow it"):
        find_images(tmp_path)


def test_images_of_which_none_is_read(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.HEIC").touch()
    with pytest.raises(ValueError, match=r"has 0 images; of 10 in a class, one can be held out\. not read: 20 \.heic$"):
        read_data(str(tmp_path), 0, 4, 64)
