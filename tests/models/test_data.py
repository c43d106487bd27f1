"""The user's text: which files are read, what a document is, what is held out, and errors of unusable data."""

import re

import numpy as np
import pytest
import tokenizers

from models.data.packing import Batch, Documents, even_rows, pack
from models.data.text import bigram_nats, read_texts, source_files, split, standard_library, tokenize
from models.data.tokenizer import Bytes, HuggingFace


def documents_in(documents: Documents) -> list[bytes]:
    return [bytes(part.astype(np.uint8)) for part in np.split(documents.tokens, documents.offsets[1:-1])]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer.json of words, whose texts end with </s>."""
    file = tmp_path_factory.mktemp("words") / "tokenizer.json"
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "one": 1, "two": 2, "</s>": 700}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.save(str(file))
    return file


def test_documents(tmp_path):
    """A document is a file, or a line of a .jsonl file; empty ones are skipped."""
    (tmp_path / "a.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "b.jsonl").write_text('{"text": "two", "id": 3}\n\n{"text": ""}\n{"text": "é\\n"}')
    (tmp_path / "c.txt").write_bytes(b"")
    found = tokenize(read_texts([tmp_path], raw=True), Bytes()).documents
    assert found.tokens.dtype == np.uint8
    assert documents_in(found) == [b"caf\xe9\n\0", b"two\0", "é\n\0".encode()]


def test_a_tokenizer(words):
    tokenizer = HuggingFace(words)
    assert (tokenizer.vocab, tokenizer.end) == (701, 700)
    found = tokenize([b"one two one", b"", b"three", b"two </s>"], tokenizer).documents
    assert found.tokens.dtype == np.uint16
    np.testing.assert_array_equal(found.tokens, [1, 2, 1, 700, 0, 700, 2, 700])
    np.testing.assert_array_equal(found.offsets, [0, 4, 6, 8])
    assert HuggingFace(words, end=2).end == 2


def test_what_cannot_be_read(tmp_path, words):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        read_texts([tmp_path / "nowhere"])
    with pytest.raises(FileNotFoundError, match=r"holds no file of \.txt, \.md, \.py, \.jsonl"):
        read_texts([tmp_path])
    (tmp_path / "b.txt").write_bytes(b"a\nb\0")
    says = r"b\.txt is no text: line 2, byte 3 is zero\. Convert it to UTF-8, leave it out, or pass"
    with pytest.raises(ValueError, match=says):
        read_texts([tmp_path])
    assert read_texts([tmp_path], raw=True) == [b"a\nb\0"]
    with pytest.raises(ValueError, match=r"begins with b'\\xff' is not UTF-8, and --tokenizer needs text"):
        tokenize([b"one", b"\xff"], HuggingFace(words))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer\.json"):
        HuggingFace(tmp_path / "tokenizer.json")


def test_each_tenth_document_is_held_out():
    texts = [f"text {i}".encode() for i in range(25)]
    train, heldout = map(documents_in, split(tokenize(texts, Bytes()).documents)[:2])
    assert heldout == [b"text 9\0", b"text 19\0"]
    assert train == [text + b"\0" for text in texts if text not in (b"text 9", b"text 19")]


def test_the_end_of_few_documents_is_held_out():
    corpus = split(Documents(np.arange(133, dtype=np.uint8), np.array([0, 100, 103, 133])))
    np.testing.assert_array_equal(corpus.train.tokens, [*range(90), *range(100, 103), *range(103, 130)])
    np.testing.assert_array_equal(corpus.train.offsets, [0, 90, 93, 120])
    np.testing.assert_array_equal(corpus.heldout.tokens, [*range(90, 100), 130, 131, 132])
    np.testing.assert_array_equal(corpus.heldout.offsets, [0, 10, 13])


@pytest.mark.parametrize("texts", [[], [b""], [b"a few"], 9 * [b"a"]])
def test_too_little(texts):
    with pytest.raises(ValueError, match=f"tokens in {sum(map(bool, texts))} documents: too little"):
        split(tokenize(texts, Bytes()).documents)


def test_standard_library(tmp_path):
    for name in "abcdefghijklmnopqrstuvwxyz":
        (tmp_path / f"{name}.py").write_text(name)
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text("never read")
    assert [file.stem for file in source_files(tmp_path)] == list("abcdefghijklmnopqrstuvwxyz")
    assert standard_library(tmp_path)[3] == b"d"
    with pytest.raises(FileNotFoundError, match=re.escape("holds 0 Python files")):
        standard_library(tmp_path / "test" / "none")


def test_bigram():
    documents = Documents(np.frombuffer(b"ab" * 50_000, np.uint8), np.array([0, 100_000]))
    nats = lambda some: bigram_nats(documents.tokens, even_rows(some, pack(some, 8), 3, 2))
    assert nats(documents) < 0.01
    assert nats(Documents(np.frombuffer(b"zzzz", np.uint8), np.array([0, 4]))) == pytest.approx(np.log(256))
    after_a = bigram_nats(np.frombuffer(b"aaab", np.uint8), Batch(*np.array([[[97]], [[98]], [[0]]])))
    assert after_a == pytest.approx(np.log(259 / 2))  # "aa" twice and "ab" once, and one more of each of the 256
