"""Text while it is drawn: whole characters, nothing of a stop word, spaces as in the whole text."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from models.streaming import TextStream
from models.tokenizer import Bytes, HuggingFace

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


def test_bytes_that_are_no_character():
    stream = TextStream(Bytes(), [])
    assert [stream.add(token) for token in (0xE2, 0x61, 0xC3)] == ["", "\ufffda", ""]
    assert stream.finish() == "\ufffd"
    assert stream.text == "\ufffda\ufffd"


def test_a_stop_word_that_is_empty():
    with pytest.raises(ValueError, match="a stop word is empty"):
        TextStream(Bytes(), [], ["a", ""])


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer whose tokens have their space before them, which a text's first one has not."""
    vocab = {"<unk>": 0, "▁one": 1, "▁two": 2, "o": 3, "</s>": 4, "▁": 5, "<0xC3>": 6, "<0xA9>": 7}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace(), tokenizers.decoders.Fuse()]
    )
    made.add_special_tokens(["</s>"])
    file = tmp_path_factory.mktemp("words") / "tokenizer.json"
    made.save(str(file))
    return HuggingFace(file)


def test_spaces_after_a_prompt(words):
    """Also after a special token, which has no text, and a character of two tokens."""
    stream = TextStream(words, [1, 1])
    assert [stream.add(token) for token in (2, 3, 4, 1, 6, 7)] == [" two", "o", "", " one", "", "é"]
    assert words.decode([1, 1, 2, 3, 4, 1, 6, 7]) == "one one" + stream.text
    assert [TextStream(words, []).add(token) for token in (1, 2)] == ["one", "two"]
    long = TextStream(words, [1] * 20)
    assert [long.add(1) for _ in range(20)] == [" one"] * 20
