"""Text that users have: encodings, lines, JSON, links and files that are none, as data, as prompts and as captions."""

import json
import os
import re

import pytest

from models.data.text import files_read, read_texts
from models.data.text_files import text_files
from models.generate.command import prompts_of

MARK = b"\xef\xbb\xbf"


@pytest.fixture
def reader(tmp_path):
    """Of a .jsonl file of data with the lines given, of prompts and of captions: one function reads them."""

    def read(*lines: bytes, before: bytes = b"") -> list[str]:
        file = tmp_path / "Lines.JSONL"
        file.write_bytes(before + b"\n".join([b'{"text": "fine"}', *lines]))
        fine, *found = read_texts([file])
        assert fine == b"fine"
        return [text.decode() for text in found]

    return read


@pytest.mark.parametrize(
    "text", ["a\u2028b", "a\u2029b", "a\u0085b", "a\u000bb", "a\x1cb", "a\r\nb", "é\U0001f600", "\ufeff"]
)
def test_lines_end_at_line_feeds_only(reader, text):
    """Raw in a JSON string, or escaped if JSON wants it."""
    raw = json.dumps(text, ensure_ascii=False).replace("\\u000b", "\\u000b")
    assert reader(f'{{"text": {raw}}}'.encode(), json.dumps({"text": text}).encode(), b"", b" \r") == [text] * 2


def test_marks_and_windows_line_ends(reader):
    assert reader(b'{"text": "a"}\r', b"\r", before=MARK) == ["a"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"null", "no JSON object with"),
        (b'["messages", "text", "prompt"]', "no JSON object with"),
        (b"NaN", "no JSON object with"),
        (b"[" * 100_000, "no JSON object with .*recursion"),
        (b'{"text": null}', "no JSON object with"),
        (b'{"text": ["a"]}', "no JSON object with"),
        (b'{"text": "a", "text": "b"}', "the key 'text' stands twice"),
        (b'{"text": "a\\ud800"}', r"'\\ud800' as character 1, which is none: half of a surrogate"),
        (b'{"text": "a\\u0000"}', "zero byte"),
        (b'{"text": "a\0"}', "no JSON object with .*control character at"),
        (b'{"text": "a"} {}', "no JSON object with .*Extra data at character "),
        (b'{"text": "a"', "no JSON object with"),
        (b'{"text": ' + b"9" * 5000 + b"}", "no JSON object with"),
        (MARK + b'{"text": "a"}', "no JSON object with .*BOM"),
    ],
    ids=range(14),
)
def test_a_line_with_an_error(reader, line, says):
    with pytest.raises(ValueError, match=rf"Lines\.JSONL, line 3: .*(?i:{says})") as found:
        reader(b"", line)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 600


def test_lines_that_are_not_utf8(reader):
    with pytest.raises(ValueError, match=r"Lines\.JSONL is no text: line 2, byte \d+, 0xe9, is not UTF-8\. Convert it"):
        reader('{"text": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"Lines\.JSONL is no text: line 1, byte 0 is of the mark of UTF-16"):
        reader(before="\ufeff".encode("utf-16-le"))


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
        ValueError,
        match=r"d\.txt is no text: line 1, byte 0 is of the mark of .* UTF-32\. Convert it .*or pass --raw-bytes",
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
