"""Text for a language model: the user's files and folders, or the sources of the Python standard library.

A line of a .jsonl file is a text, or a conversation of which the assistant's words are learned.
"""

import itertools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from models.data.chat import ChatTemplate, Conversation, Marked, conversation, encode
from models.data.packing import Batch, Documents
from models.data.text_files import CONVERT, JsonLine, is_json_lines, json_lines, read_bytes, read_utf8, text_files
from models.data.tokenizer import Tokenizer

SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
HELDOUT_EVERY = 10


class Corpus(NamedTuple):
    """Documents to train on, and others to evaluate on; remark: a line about conversations that were cut, or ""."""

    train: Documents
    heldout: Documents
    remark: str = ""


def source_files(root: Path) -> list[Path]:
    """The Python files under root, without tests and installed packages, in the same order on every machine."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_DIRECTORIES]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def standard_library(root: Path | None = None) -> list[bytes]:
    """The sources under root, by default those of the running Python."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = source_files(root)
    if len(files) < HELDOUT_EVERY:
        raise FileNotFoundError(
            f"{root} holds {len(files)} Python files; at least {HELDOUT_EVERY} are needed. A Python without its "
            "sources? Install them, or pass --data."
        )
    return [file.read_bytes() for file in files]


def files_read(paths: Sequence[str | Path]) -> dict[str, Path]:
    """The files that `read_texts` reads, or `standard_library` without paths, by name."""
    if paths:
        return {str(file): file for file in text_files(paths)}
    root = Path(sysconfig.get_paths()["stdlib"])
    return {f"Python's {file.relative_to(root)}": file for file in source_files(root)}


def read_texts(paths: Sequence[str | Path], *, raw: bool = False) -> list[bytes | Conversation]:
    """All documents of `text_files`: a file each, or of a .jsonl file the "text" or the "messages" of each line.

    Files must be UTF-8 without zero bytes, which end a document, unless they are read `raw`.
    """
    texts: list[bytes | Conversation] = []
    for file in text_files(paths):
        if is_json_lines(file):
            texts += map(_document, json_lines(file, 'a "text" that is a string, or with "messages"'))
        else:
            remedy = f"{CONVERT[:-1]}, leave it out, or pass --raw-bytes."
            texts.append(read_bytes(file) if raw else read_utf8(file, remedy))
    return texts


def _document(line: JsonLine) -> bytes | Conversation:
    if "messages" in line.given:
        return conversation(line.given, line.source)
    return line.text("text").encode()


class Tokenized(NamedTuple):
    """Documents; remark: a line about conversations that were cut, with its line break, or ""."""

    documents: Documents
    remark: str


def tokenize(
    texts: Sequence[bytes | Conversation], tokenizer: Tokenizer, template: ChatTemplate | None = None, context: int = 0
) -> Tokenized:
    """Each nonempty text as a document, followed by the tokenizer's `end` if it has one.

    With a template, conversations are as it writes them, and only the assistant's words are scored. A conversation of
    more than `context` predictions is cut, and left out if none is scored before.
    """
    plain = iter(_ended(tokenizer.encode_all([text for text in texts if isinstance(text, bytes) and text]), tokenizer))
    if template is None:
        return Tokenized(_joined(list(plain), tokenizer), "")
    kept, cut, left_out = list[Marked](), 0, 0
    for text in texts:
        if not isinstance(text, Conversation):
            kept += [Marked(tokens, np.ones(len(tokens), bool)) for tokens in itertools.islice(plain, bool(text))]
            continue
        whole = encode(tokenizer, template.mark(text))
        short = Marked(whole.tokens[: context + 1], whole.scored[: context + 1])
        cut += len(whole.tokens) > context + 1
        if short.scored[1:].any():
            kept.append(short)
        else:
            left_out += 1
    documents = _joined([one.tokens for one in kept], tokenizer)
    documents = documents._replace(scored=np.concatenate([np.empty(0, bool), *(one.scored for one in kept)]))
    remark = f"{cut:,} conversations have more than context={context:,} tokens and are cut there"
    remark += f"; {left_out:,} have no words of the assistant before and are left out\n" if left_out else "\n"
    return Tokenized(documents, remark if cut or left_out else "")


def _ended(texts: Sequence[np.ndarray], tokenizer: Tokenizer) -> list[np.ndarray]:
    end = tokenizer.end
    return [text if end is None or (len(text) and text[-1] == end) else np.append(text, end) for text in texts]


def _joined(texts: Sequence[np.ndarray], tokenizer: Tokenizer) -> Documents:
    dtype = np.min_scalar_type(tokenizer.vocab - 1)
    tokens = np.concatenate([np.empty(0, dtype), *(text.astype(dtype) for text in texts)])
    return Documents(tokens, np.cumsum([0, *(len(text) for text in texts)]))


def split(documents: Documents, source: str = "the data") -> Corpus:
    """Holds out each tenth document, or with fewer than ten the last tenth of each; of conversations the last one."""
    lengths = np.diff(documents.offsets)
    tenth = np.arange(len(lengths)) % HELDOUT_EVERY == HELDOUT_EVERY - 1
    if documents.scored is not None and not tenth.any():
        tenth = np.arange(len(lengths)) == len(lengths) - 1  # a part of a conversation is none
    held = np.where(tenth, lengths, 0) if tenth.any() else lengths // HELDOUT_EVERY
    trained = lengths - held
    is_held = np.repeat(np.tile([False, True], len(lengths)), np.stack([trained, held], axis=1).ravel())
    parts = []
    for which, some in ((~is_held, trained), (is_held, held)):
        scored = None if documents.scored is None else documents.scored[which]
        parts.append(Documents(documents.tokens[which], np.cumsum([0, *some[some > 0]]), scored))
    if not all((np.diff(part.offsets) > 1).any() for part in parts):
        raise ValueError(
            f"{source} is {len(documents.tokens):,} tokens in {len(lengths):,} documents: too little to train on, and "
            "to hold a tenth out of."
        )
    return Corpus(*parts)


def bigram_nats(train: np.ndarray, batch: Batch) -> float:
    """Mean nats a byte of a bigram table of train with add-one smoothing, over a batch's predictions."""
    pairs = np.bincount(train[:-1].astype(np.int64) * 256 + train[1:], minlength=256 * 256).reshape(256, 256) + 1
    log_probs = np.log(pairs / pairs.sum(axis=1, keepdims=True))
    return float(-np.mean(log_probs[batch.tokens, batch.targets][batch.counts()]))
