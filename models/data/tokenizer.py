"""Text to tokens and back: bytes, or a tokenizer.json."""

import pathlib
from collections.abc import Sequence

import numpy as np

from models.hf.config import MOST_TOKENS, end_token, ends_in

TOGETHER = 1_000  # texts that are encoded at once: what the library keeps of each token is much more than its number
# Names of the token that ends a text.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")


class Bytes:
    """Each byte of UTF-8 is a token; zero, which no text has, ends a text.

    Attributes:
      end: the token that ends a document of training data, or None.
      special: tokens that are no text, such as the end of a turn.
    """

    vocab: int = 256
    end: int | None = 0
    special: frozenset[int] = frozenset({0})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_rendered(self, text: str) -> tuple[list[int], np.ndarray]:
        """Of text that has its special tokens: (tokens, the characters [N, 2] that each covers). None is added."""
        characters = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return self.encode(text), np.stack([characters, characters + 1], axis=1)

    def decode(self, tokens: Sequence[int]) -> str:
        # A model may have more tokens than it was trained on.
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def encode_all(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]


class HuggingFace:
    """The tokenizer of a tokenizer.json, as `Bytes`; texts end with `end`, or the first of `ENDS` in its vocabulary.

    As in transformers, the truncation and the padding that were saved do not count, and the tokens that the
    post-processor adds to a text, such as its first one, do. A BPE's dropout does not count: it would make other
    tokens in each run.

    Attributes:
      source: the file's text, to be saved beside a model.
    """

    def __init__(self, file: pathlib.Path, end: int | None = None):
        import tokenizers  # only where there is one

        try:
            self.source = file.read_bytes().decode()
            self.tokenizer = tokenizers.Tokenizer.from_str(self.source.removeprefix("\ufeff"))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file} is no tokenizer.json: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        if isinstance(self.tokenizer.model, tokenizers.models.BPE):
            self.tokenizer.model.dropout = None
        tokens = self.tokenizer.get_vocab().values()
        if not tokens or max(tokens) >= MOST_TOKENS:
            raise ValueError(
                f"{file} has {len(tokens):,} tokens up to {max(tokens, default=0):,}; it needs one to {MOST_TOKENS:,}."
            )
        self.vocab = 1 + max(tokens)
        known = (self.tokenizer.token_to_id(name) for name in ENDS)
        self.end: int | None = next((token for token in known if token is not None), None) if end is None else end
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def encode_rendered(self, text: str) -> tuple[list[int], np.ndarray]:
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        covers = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        # Some tokenizers leave out white space: it belongs to the token after it.
        before = np.maximum.accumulate(np.concatenate([[0], covers[:-1, 1]]))
        return encoded.ids, np.stack([np.minimum(covers[:, 0], before), covers[:, 1]], axis=1)

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        return self.tokenizer.decode(list(tokens))

    def encode_all(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        found = []
        for at in range(0, len(texts), TOGETHER):
            encoded = self.tokenizer.encode_batch_fast([_decode(text) for text in texts[at : at + TOGETHER]])
            found += [np.array(one.ids, np.int64) for one in encoded]
        return found


Tokenizer = Bytes | HuggingFace


def _decode(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the document that begins with {text[:60]!r} is not UTF-8, and --tokenizer needs text: {error}."
        ) from error


def tokenizer_of(folder: pathlib.Path, vocab: int) -> Tokenizer:
    """The tokenizer of a checkpoint."""
    file = folder / "tokenizer.json"
    if file.exists():
        return HuggingFace(file, end_token(folder))
    if vocab < 256:
        raise ValueError(f"{folder} has no tokenizer.json, and with {vocab} tokens the model knows no bytes.")
    return Bytes()


def end_tokens(folder: pathlib.Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end what a checkpoint writes: of generation_config.json, else of config.json or the tokenizer.

    None for bytes: few models of bytes have learned to end.
    """
    if isinstance(tokenizer, Bytes):
        return ()
    found = ends_in(folder / "generation_config.json") or ends_in(folder / "config.json")
    return found or (() if tokenizer.end is None else (tokenizer.end,))
