"""SHA256SUMS of files of any name: sha256sum reads what we write, and we read what it writes. Text in any locale."""

import locale
import os
import subprocess

import pytest

from models.data.chat import template_of
from models.training import config
from models.training.whole_files import NAME, replace, verify, written_whole

NAMES = ["a b", "-x", "*", " x ", "\u00fc", "\u2028", "\udcff", "{}$HOME"]


@pytest.mark.parametrize("flags", [None, [], ["--binary"]], ids=["by us", "as text", "as binary"])
def test_names(flags, tmp_path):
    folder = tmp_path / "a\n[b]"
    with written_whole(folder) as new:
        for name in NAMES:
            (new / name).write_bytes(os.fsencode(name))
    assert sorted(os.listdir(folder)) == sorted([NAME, *NAMES])  # noqa: PTH208 - the names alone
    if flags is None:
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", NAME], cwd=folder, check=True)
    else:
        made = subprocess.run(["sha256sum", *flags, "--", *NAMES], cwd=folder, capture_output=True, check=True)
        (folder / NAME).write_bytes(made.stdout)
    verify(folder)
    for name in NAMES:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(b"other")
        with pytest.raises(ValueError, match="is not what was written") as caught:
            verify(folder)
        assert str(caught.value).startswith(f"{folder / name} is not what")
        (folder / name).write_bytes(content)
    (folder / "a b").unlink()
    with pytest.raises(ValueError, match="a b is missing"):
        verify(folder)


@pytest.mark.parametrize("line", ["", "0" * 63 + "  a", "0" * 64 + "  a/b", "0" * 64 + "  "])
def test_no_line(line, tmp_path):
    (tmp_path / NAME).write_text(f"{line}\n", "utf-8")
    with pytest.raises(ValueError, match=r"SHA256SUMS, line 1: .* is no checksum and file name"):
        verify(tmp_path)


def test_replaced_text_is_utf8_without_translation(tmp_path):
    replace(tmp_path / "x", "\u00fc\r\n\n")
    assert (tmp_path / "x").read_bytes() == b"\xc3\xbc\r\n\n"


@pytest.fixture
def ascii_locale():
    """The default of `open`, as in a container without a locale; not in Python's UTF-8 mode."""
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


def test_utf8_in_any_locale(ascii_locale, tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"<\xef\xbd\x9cUser\xef\xbd\x9c>{{ messages[0].content }}")
    (tmp_path / "mine.yaml").write_bytes(b"# d\xc3\xa9j\xc3\xa0 vu\nlearning_rate: 1e-3\nname: \xe4\xbd\xa0\n")
    assert config.read(tmp_path / "mine.yaml") == {"learning_rate": 1e-3, "name": "\u4f60"}
    replace(tmp_path / "out", template_of(tmp_path).render([{"role": "user", "content": "\u00e9"}], prompt=True))
    assert (tmp_path / "out").read_bytes() == b"<\xef\xbd\x9cUser\xef\xbd\x9c>\xc3\xa9"
