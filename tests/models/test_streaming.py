"""Text while it is drawn: whole characters, nothing of a stop word, spaces as in the whole text."""

import pathlib

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.models import BPE, WordPiece

from models.data.tokenizer import Bytes, HuggingFace
from models.generate.streaming import TextStream

CHAT = pathlib.Path(__file__).parents[1] / "data" / "chat" / "tokenizer.json"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "▁", "▁▁", "o", "▁k", "\ufffd", "你", "▁你", ".", "n't", " ", *BYTES]
WORDS = ["[UNK]", "do", "##n", "n", "'", "t", "##.", ".", "!", "n't", "'s", "é", "不"]
some_text = st.text(st.sampled_from("ab é€😀\n"), max_size=20)


def pieces_of(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(Bytes(), list("vor é".encode()), stops)
    pieces = [stream.add(token) for token in text.encode()]
    return [*pieces, stream.finish()], stream


@given(some_text)
def test_characters_come_whole(text):
    pieces, stream = pieces_of(text)
    assert "".join(pieces) == stream.text == text
    assert pieces[-1] == ""
    assert [piece for piece in pieces if piece] == list(text)


@given(some_text, st.lists(some_text.filter(bool), min_size=1, max_size=3))
def test_the_text_ends_before_the_first_stop_word_that_is_complete(text, stops):
    pieces, stream = pieces_of(text, tuple(stops))
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    first = min((end for end, _ in ends), default=None)
    wanted = text if first is None else text[: min(begin for end, begin in ends if end == first)]
    assert "".join(pieces) == stream.text == wanted
    assert stream.stopped == bool(ends)


def test_what_may_be_a_stop_word_is_held_back():
    pieces, stream = pieces_of("a STOx STOP b", (" STOP",))
    assert pieces == ["a", "", "", "", "", " STOx", "", "", "", "", "", "", "", ""]
    assert stream.stopped
    assert pieces_of("a ST", (" STOP",))[0] == ["a", "", "", "", " ST"]


def replaced(*more: decoders.Decoder) -> decoders.Decoder:
    """Llama 2's and Gemma's decoder begin like this."""
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def pieces(decoder: decoders.Decoder | None) -> tuple:
    vocab = {piece: number for number, piece in enumerate(PIECES)}
    return BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True), decoder


ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
KINDS = {
    "Llama 2": pieces(replaced(decoders.Strip(" ", 1, 0))),
    "Gemma": pieces(replaced()),
    "Metaspace": pieces(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "WordPiece": (WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"), decoders.WordPiece()),
    "ByteLevel": (
        BPE({piece: i for i, piece in enumerate([*ALPHABET, "Ġthe", "ä½ł", "ä½", "łå"])}, []),
        decoders.ByteLevel(),
    ),
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    found: dict = {"bytes": Bytes(), "chat": HuggingFace(CHAT)}
    for name, (model, decoder) in KINDS.items():
        made = tokenizers.Tokenizer(model)
        if decoder is not None:
            made.decoder = decoder
        made.add_special_tokens(["<s>"])
        made.add_tokens(["<added>"])
        file = tmp_path_factory.mktemp("kind") / "tokenizer.json"
        made.save(str(file))
        found[name] = HuggingFace(file)
    return found


# Of the tokens that are bytes the library decodes a whole run as U+FFFD if one is no part of a character.
WHOLE = ["Llama 2", "Gemma", "Metaspace"]
texts = st.sampled_from(["你好世界", "é€😀", "the k", "\ufffd", "don't.", "o", "<s>", "<added>"])


@pytest.mark.parametrize("name", ["bytes", "chat", *KINDS])
@settings(max_examples=40)
@given(before=st.lists(texts, max_size=4), after=st.lists(texts, max_size=6), data=st.data())
def test_what_is_streamed_is_what_decoding_at_once_gives(kinds, name, before, after, data):
    """Of characters that are whole, in parts or broken, special tokens among them, also at the prompt's end."""
    tokenizer = kinds[name]
    prompt, drawn = ([token for text in some for token in tokenizer.encode(text)] for some in (before, after))
    if name not in WHOLE:
        drawn = data.draw(st.lists(st.integers(0, tokenizer.vocab - 1), max_size=6)) + drawn
        prompt = prompt[: len(prompt) - data.draw(st.integers(0, 3))]
    stream = TextStream(tokenizer, prompt)
    shown = "".join(stream.add(token) for token in drawn) + stream.finish()
    assert shown == stream.text == tokenizer.decode(prompt + drawn)[len(tokenizer.decode(prompt)) :]


def test_a_token_that_ends_within_a_character(kinds):
    tokens = [kinds["ByteLevel"].tokenizer.token_to_id(piece) for piece in ("ä½", "łå", "¥", "½")]
    stream = TextStream(kinds["ByteLevel"], [])
    assert [stream.add(token) for token in tokens] == ["", "", "", "你好"]


def test_the_stop_word_that_ends_first(kinds):
    """As letter by letter, if a token completes several."""
    stream = TextStream(kinds["Gemma"], [], ["n't", "'"])
    assert (stream.add(PIECES.index("n't")), stream.stopped, stream.finish()) == ("n", True, "")


@pytest.mark.parametrize("name", ["bytes", "Gemma", "ByteLevel"])
def test_tokens_without_text_are_not_decoded_again_and_again(kinds, name, monkeypatch):
    counted, tokenizer = [], kinds[name]
    decode = tokenizer.decode
    token = 255 if name == "bytes" else tokenizer.encode("<s>")[0]
    stream = TextStream(tokenizer, [])
    monkeypatch.setattr(tokenizer, "decode", lambda tokens: counted.append(len(tokens)) or decode(tokens))
    assert {stream.add(token) for _ in range(2000)} == {""}
    assert stream.finish() == ("\ufffd" * 2000 if name == "bytes" else "")
    assert sum(counted) < 20 * 2000
