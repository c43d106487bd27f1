"""Text that users have: encodings, lines, JSON, links and files that are none, as data, as prompts and as captions."""

import json
import os
import re

import pytest
from PIL import Image

from models.data.pairs import read_pairs
from models.data.text import files_read, read_texts
from models.data.text_files import text_files
from models.generate.command import prompts_of

MARK = b"\xef\xbb\xbf"


def texts_by(reader: str, folder, lines: list[bytes]) -> list[str]:
    """What a reader finds in a .jsonl file, whose lines have the key KEY."""
    file = folder / "Lines.JSONL"
    key = {"data": b"text", "prompts": b"prompt", "pairs": b"text"}[reader]
    file.write_bytes(b"\n".join(lines).replace(b"KEY", key))
    if reader == "data":
        return [text.decode() for text in read_texts([file])]
    if reader == "prompts":
        return prompts_of(file)
    data = read_pairs(str(file), 4, 64)
    return [caption for pairs in (data.train, data.heldout) for (caption,) in pairs.captions]


@pytest.fixture(params=["data", "prompts", "pairs"])
def reader(request, tmp_path):
    """Of a .jsonl file with the lines given, ten of which are fine."""
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")

    def read(*lines: bytes, before: bytes = b"") -> list[str]:
        fine = [b'{"KEY": "%d", "image": "0.png"}' % i for i in range(10)]
        found = texts_by(request.param, tmp_path, [before + fine[0], *lines, *fine[1:]])
        assert set(found) >= set("0123456789")
        return [text for text in found if text not in "0123456789"]

    return read


@pytest.mark.parametrize(
    "text", ["a\u2028b", "a\u2029b", "a\u0085b", "a\u000bb", "a\x1cb", "a\r\nb", "é\U0001f600", "\ufeff"]
)
def test_lines_end_at_line_feeds_only(reader, text):
    """Raw in a JSON string, or escaped if JSON wants it."""
    raw = json.dumps(text, ensure_ascii=False).replace("\\u000b", "\\u000b")
    lines = [f'{{"KEY": {raw}, "image": "0.png"}}'.encode(), json.dumps({"KEY": text, "image": "0.png"}).encode()]
    assert [found.strip() for found in reader(*lines, b"", b" \r")] == [text.strip()] * 2


def test_marks_and_windows_line_ends(reader):
    assert reader(b'{"KEY": "a", "image": "0.png"}\r', b"\r", before=MARK) == ["a"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"null", "no JSON object with"),
        (b'["messages", "text", "prompt"]', "no JSON object with"),
        (b'"messages"', "no JSON object with"),
        (b"7", "no JSON object with"),
        (b"NaN", "no JSON object with"),
        (b"[" * 100_000, "no JSON object with .*recursion"),
        (b'{"a":' * 100_000, "no JSON object with .*recursion"),
        (b'{"KEY": null, "image": "0.png"}', "no JSON object with"),
        (b'{"KEY": NaN, "image": "0.png"}', "no JSON object with"),
        (b'{"KEY": ["a"], "image": "0.png"}', "no JSON object with"),
        (b'{"KEY": "a", "KEY": "b", "image": "0.png"}', "the key '(text|prompt)' stands twice"),
        (b'{"KEY": "a\\ud800", "image": "0.png"}', r"'\\ud800' as character 1, which is none: half of a surrogate"),
        (b'{"KEY": "a\\u0000", "image": "0.png"}', "zero byte"),
        (b'{"KEY": "a\0", "image": "0.png"}', "no JSON object with .*control character at"),
        (b'{"KEY": "a", "image": "0.png"} {}', "no JSON object with .*Extra data at character "),
        (b'{"KEY": "a", "image": "0.png"', "no JSON object with"),
        (b'{"KEY": ' + b"9" * 5000 + b"}", "no JSON object with"),
        (MARK + b'{"KEY": "a", "image": "0.png"}', "no JSON object with .*BOM"),
    ],
    ids=range(18),
)
def test_a_line_with_an_error(reader, line, says):
    with pytest.raises(ValueError, match=rf"Lines\.JSONL, line 3: .*(?i:{says})") as found:
        reader(b"", line)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 600


def test_lines_that_are_not_utf8(reader):
    with pytest.raises(ValueError, match=r"Lines\.JSONL is no text: line 2, byte \d+, 0xe9, is not UTF-8\. Convert it"):
        reader('{"KEY": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"Lines\.JSONL is no text: byte 0 is not UTF-8 but the mark of UTF-16"):
        reader(before="\ufeff".encode("utf-16-le"))


@pytest.mark.parametrize(
    "messages", ['[{"role": "user", "content": "TEXT"}]', '[{"role": "user", "content": "a", "TEXT": 1}]']
)
@pytest.mark.parametrize(("text", "says"), [("\\udfff", "half of a surrogate"), ("\\u0000", "zero byte")])
def test_messages_that_no_encoder_takes(tmp_path, messages, text, says):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"messages": {messages.replace("TEXT", text)}}}')
    for read in (prompts_of, lambda file: read_texts([file])):
        with pytest.raises(ValueError, match=rf"a\.jsonl, line 1: a text in messages or tools has .*{says}"):
            read(file)


def test_prompts_of_text(tmp_path):
    file = tmp_path / "p.TXT"
    file.write_bytes(MARK + "one\x0ctwo\r\n\n \t\nthree\u0085four\u2028five\rsix \n\x0c\n".encode())
    assert prompts_of(file) == ["one\x0ctwo", "three\u0085four\u2028five\rsix "]
    for content, says in (
        (b"", "has no line with a prompt"),
        (b"\n \n", "has no line with a prompt"),
        (b"a\nb\0\n", "line 2: the prompt has a zero byte"),
        (b"a\n\xe9", "line 2, byte 2, 0xe9, is not"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"p\.TXT.* ?{says}"):
            prompts_of(file)
    (tmp_path / "p.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"p\.jsonl has no line with a prompt"):
        prompts_of(tmp_path / "p.jsonl")


@pytest.mark.parametrize("before", [b"", MARK], ids=["bare", "marked"])
@pytest.mark.parametrize("text", ["\uff01a", "\ufefba"], ids=ascii)
def test_a_mark_is_dropped_whole_and_nothing_else(text, before, tmp_path):
    """Characters whose UTF-8 begins with bytes of the mark stay."""
    file = tmp_path / "a.txt"
    file.write_bytes(before + text.encode())
    assert read_texts([file]) == [text.encode()]
    assert prompts_of(file) == [text]


def test_documents_of_text(tmp_path):
    """A mark is dropped, unless bytes are wanted as they are."""
    for name, content in (("a.TXT", MARK + b"\xc3\xa9\r\n"), ("b.Md", b""), ("c.jsonl", b"\n\n")):
        (tmp_path / name).write_bytes(content)
    assert read_texts([tmp_path]) == [b"\xc3\xa9\r\n", b""]
    assert read_texts([tmp_path], raw=True) == [MARK + b"\xc3\xa9\r\n", b""]
    (tmp_path / "d.txt").write_text("\ufeffa", encoding="utf-16")
    with pytest.raises(
        ValueError, match=r"d\.txt is no text: byte 0 is not .* UTF-32\. Convert it .*or pass --raw-bytes"
    ):
        read_texts([tmp_path])
    (tmp_path / "d.txt").unlink()
    for name in ("x.json", "x.NDJSON"):
        (tmp_path / name).write_text("[]")
        with pytest.raises(
            ValueError, match=rf"{name} is neither text nor lines by its name: write a JSON object a line"
        ):
            read_texts([tmp_path / name])
        assert read_texts([tmp_path / name], raw=True) == [b"[]"]
    assert len(read_texts([tmp_path])) == 2, "in a folder they are not read"


def test_links(tmp_path):
    """Files and folders behind links are read; each folder once."""
    outside, data = tmp_path / "outside", tmp_path / "data"
    for file in (outside / "deep" / "a.txt", data / "b.txt", tmp_path / ".hidden" / "c.txt"):
        file.parent.mkdir(parents=True)
        file.write_text(file.name)
    (data / "z").symlink_to(outside)
    (data / "loop").symlink_to(data)
    (outside / "deep" / "up").symlink_to("..")
    (data / "d.txt").symlink_to(outside / "deep" / "a.txt")
    (data / ".c").symlink_to(tmp_path / ".hidden")
    (data / "itself.md").symlink_to("itself.md")
    names = ["b.txt", "d.txt", "itself.md", "z/deep/a.txt"]
    assert [file.relative_to(data).as_posix() for file in text_files([data])] == names
    with pytest.raises(FileNotFoundError, match=r"itself\.md is a link to itself\.md, which does not exist: repair it"):
        read_texts([data])
    (data / "itself.md").unlink()
    assert read_texts([data]) == [b"b.txt", b"a.txt", b"a.txt"]
    (tmp_path / "link").symlink_to(data)
    assert list(files_read([tmp_path / "link"])) == [f"{tmp_path}/link/{name}" for name in names if name != "itself.md"]
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=r"gone is a link to nowhere, which does not exist"):
        read_texts([tmp_path / "gone"])


def test_what_is_no_file(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.txt")
    for read, given in ((read_texts, [tmp_path]), (read_texts, ["/dev/null"]), (prompts_of, tmp_path / "pipe.txt"),
                        (prompts_of, tmp_path)):  # fmt: skip
        with pytest.raises(ValueError, match="is no regular file: name one, or write its content to one"):
            read(given)
    with pytest.raises(ValueError, match="is no regular file"):
        read_texts([tmp_path], raw=True)
    with pytest.raises(OSError, match=re.escape("cannot be read: File name too long. Allow it, name another one")):
        text_files(["x" * 5000])
    with pytest.raises(ValueError, match="a path of the text is empty: name a file or a folder"):
        text_files([tmp_path, ""])
    with pytest.raises(FileNotFoundError, match=r"none\.txt cannot be read: No such file"):
        prompts_of(tmp_path / "none.txt")
    (tmp_path / "pipe.txt").unlink()
    (tmp_path / "a.txt").write_text("a")
    denied = PermissionError(13, "Permission denied", "theirs")  # root may read everything
    monkeypatch.setattr("pathlib.Path.iterdir", lambda *_: (_ for _ in ()).throw(denied))
    with pytest.raises(PermissionError, match="theirs cannot be read: Permission denied"):
        text_files([tmp_path])
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda *_: (_ for _ in ()).throw(denied))
    with pytest.raises(PermissionError, match="theirs cannot be read: Permission denied"):
        prompts_of(tmp_path / "a.txt")
