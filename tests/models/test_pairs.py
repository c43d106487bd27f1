"""Images with captions: the digits in words, folders, .jsonl files, and what is said of those that are wrong."""

import json

import pytest
from PIL import Image

from models.data.digits_in_words import WORDS, captions_of, digit_in
from models.data.pairs import files_read, read_pairs


def test_captions_of_digits():
    every = [caption for digit in range(10) for caption in captions_of(digit)]
    assert len(every) == len(set(every)) == 38, "no caption is of two digits"
    assert {"a seven", "the digit 7", "one more than six", "one less than eight"} == set(captions_of(7))
    assert captions_of(8)[0] == "an eight"
    assert captions_of(1)[0] == "a one"
    for digit in range(10):
        for caption in captions_of(digit):
            assert digit_in(caption) == digit
            last = caption.split()[-1]
            number = int(last) if last.isdigit() else WORDS.index(last)
            assert number + caption.startswith("one more") - caption.startswith("one less") == digit
    for wrong in ("", "a", "a seve", "one more than nine", "one less than zero", "the digit 10", "a seven "):
        assert digit_in(wrong) is None


def test_digits():
    data = read_pairs("digits", 4, 64)
    assert (len(data.train.pixels), len(data.heldout.pixels), data.patch, data.channels) == (1573, 224, 2, 1)
    for pairs, labels in zip((data.train, data.heldout), data.labels, strict=True):
        assert len(pairs.pixels) == len(pairs.captions) == len(labels)
        assert {image.shape for image in pairs.pixels} == {(8, 8, 1)}
        assert all(
            digit_in(caption) == label for some, label in zip(pairs.captions, labels, strict=True) for caption in some
        )
    train = {image.tobytes() for image in data.train.pixels}
    assert not any(image.tobytes() in train for image in data.heldout.pixels)
    assert max(image.max() for image in data.train.pixels) == 255
    assert files_read("digits") == {}


def save(file, text: str | bytes | None = None, value: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 12), (value, 0, 0)).save(file)
    if isinstance(text, str):
        text = text.encode()
    if text is not None:
        file.with_suffix(".txt").write_bytes(text)


@pytest.fixture
def folder(tmp_path):
    for i in range(20):
        save(tmp_path / ("deep" if i % 2 else "") / f"{i:02}.png", f"  number {i}\n", 10 * i)
    return tmp_path


def assert_pairs(data):
    """Each image with its own caption, and two of twenty held out."""
    assert (len(data.train.pixels), len(data.heldout.pixels), data.channels, data.labels) == (18, 2, 3, None)
    for pairs in (data.train, data.heldout):
        for image, captions in zip(pairs.pixels, pairs.captions, strict=True):
            assert image.shape == (12, 16, 3)
            assert captions == (f"number {image[0, 0, 0] // 10}",)


def test_a_folder(folder):
    assert_pairs(read_pairs(str(folder), 4, 64))
    assert len(files_read(str(folder))) == 40
    assert read_pairs(str(folder), 4, 3).train.pixels[0].shape == (4, 8, 3), "at most three patches"


def test_captions_of_any_machine(folder):
    """Suffixes in capitals, byte order marks and line ends of Windows."""
    for number, file in enumerate(sorted(folder.rglob("*.txt"))):
        content = b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n")
        file.with_suffix(".TXT" if number % 2 else ".txt").write_bytes(content)
        if number % 2:
            file.unlink()
    assert_pairs(read_pairs(str(folder), 4, 64))
    assert len(files_read(str(folder))) == 40
    assert all(file.exists() for file in files_read(str(folder)).values())
    file = next(folder.rglob("*.TXT"))
    file.with_suffix(".txt").write_text("another")
    with pytest.raises(ValueError, match=r"\.txt and \d+\.TXT are captions of one image: remove one"):
        read_pairs(str(folder), 4, 64)


def test_a_jsonl_file(folder):
    file = folder / "pairs.jsonl"
    images = sorted(folder.rglob("*.png"))
    lines = [
        json.dumps({"image": str(i.relative_to(folder)), "text": f"number {int(i.stem)}", "id": 1}) for i in images
    ]
    file.write_text("\n\n".join(lines))
    assert_pairs(read_pairs(str(file), 4, 64))
    assert set(files_read(str(file))) == {str(file), *map(str, images)}


def test_no_pairs(folder, tmp_path_factory):
    with pytest.raises(ValueError, match="'cats' is not one of digits, no folder"):
        read_pairs("cats", 4, 64)
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ValueError, match="has 0 pairs of image and caption; of 10 one can be held out"):
        read_pairs(str(empty), 4, 64)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda folder: save(folder / "x.png"), r"x\.png has no caption: x\.txt is missing\."),
        (lambda folder: [save(folder / f"{x}.png") for x in "xyz"], r"x\.txt is missing, and 2 more"),
        (lambda folder: (folder / "x.txt").write_text("x"), r"x\.txt is the caption of no image"),
        (lambda folder: save(folder / "x.png", " \n"), r"x\.txt: the caption is empty"),
        (lambda folder: save(folder / "x.png", b"\xff\xfe"), r"x\.txt is no text: line 1, byte 0"),
        (lambda folder: save(folder / "x.png", "a\0b"), r"x\.txt: the caption has a zero byte"),
        (lambda folder: [save(folder / "x.png", "x"), save(folder / "x.bmp")], r"x\.bmp and x\.png have one caption"),
        (
            lambda folder: [save(folder / "x.png", "x"), (folder / "x.png").write_bytes(b"no image")],
            r"x\.png cannot be read as an image",
        ),
    ],
)
def test_a_folder_with_an_error(folder, change, error):
    change(folder)
    with pytest.raises(ValueError, match=error):
        read_pairs(str(folder), 4, 64)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", r"line 2: '\{' is no JSON object with an \"image\" and a \"text\" that are strings"),
        ('{"image": "00.png", "text": 7}', "that are strings"),
        ('{"image": "none.png", "text": "x"}', r"line 2: there is no image .*none\.png"),
        ('{"image": "00.png", "text": " "}', "line 2: the caption is empty"),
    ],
)
def test_a_jsonl_file_with_an_error(folder, line, error):
    (folder / "pairs.jsonl").write_text('{"image": "00.png", "text": "x"}\n' + line)
    with pytest.raises(ValueError, match=error):
        read_pairs(str(folder / "pairs.jsonl"), 4, 64)
