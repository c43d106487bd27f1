"""What a saved tokenizer.json carries, and what of it counts: as in transformers, the same tokens in every run."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from flax import nnx
from tokenizers import models, pre_tokenizers, processors

from models.data.packing import Documents
from models.data.text import tokenize
from models.data.tokenizer import Bytes, HuggingFace, end_tokens, tokenizer_of
from models.decoder import Decoder
from models.hf.config import end_token
from models.training.lm import choose_tokenizer, save_checkpoint
from tests.models.test_train_lm import TINY

VOCAB = {"<s>": 0, "a": 1, "b": 2, "ab": 3, "c": 7, "</s>": 9}


def made_with(**parts) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(VOCAB, [("a", "b")], dropout=parts.pop("dropout", None)))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def tokens_of(tokenizer) -> list[list[int]]:
    """Of each way to encode."""
    text = "ab a " * 30
    all_at_once, short = tokenizer.encode_all([text.encode(), b"c"])
    assert short.tolist() == [7]
    return [tokenizer.encode(text), tokenizer.encode_rendered(text)[0], all_at_once.tolist()]


@pytest.mark.parametrize("saved", ["plain", "truncation", "padding", "both", "dropout", "mark"])
def test_what_was_saved_for_another_use_does_not_count(saved, tmp_path):
    made = made_with(dropout=0.5 if saved == "dropout" else None)
    if saved in ("truncation", "both"):
        made.enable_truncation(16, stride=4, direction="left")
    if saved in ("padding", "both"):
        made.enable_padding(length=64, pad_id=9, pad_token="</s>")
    file = tmp_path / "tokenizer.json"
    file.write_text(("\ufeff" if saved == "mark" else "") + made.to_str(), encoding="utf-8")
    for _ in range(2):
        assert tokens_of(HuggingFace(file)) == [[3, 1] * 30] * 3


def test_the_post_processor_counts(tmp_path):
    """Of texts; conversations have their special tokens in their text."""
    added = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made_with(post_processor=added).save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFace(tmp_path / "tokenizer.json", end=0)
    assert tokenizer.encode("ab") == [0, 3]
    assert tokenizer.encode_rendered("ab")[0] == [3]
    assert tokenize([b"ab", b"c"], tokenizer).documents.tokens.tolist() == [0, 3, 0, 0, 7, 0]


def test_a_saved_model_has_the_same_file(tmp_path):
    """Byte by byte, truncation included: it is the user's."""
    made = made_with()
    made.enable_truncation(16)
    file = tmp_path / "tokenizer.json"
    file.write_bytes(b"\xef\xbb\xbf" + made.to_str().encode() + b"\r\n")
    preset, tokenizer = choose_tokenizer(dataclasses.replace(TINY, tokenizer=str(file)))
    save_checkpoint(tmp_path / "hf", preset, Decoder(preset.model, rngs=nnx.Rngs(0)), tokenizer)
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert tokens_of(tokenizer_of(tmp_path / "hf", preset.model.vocab)) == tokens_of(tokenizer)


def test_numbers_of_tokens(tmp_path):
    made = made_with()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFace(tmp_path / "tokenizer.json")
    assert (tokenizer.vocab, tokenizer.end) == (10, 9), "with holes at 4 to 6 and at 8"
    assert tokenizer.decode([1, 5, 2, 1000]) == "a b"
    for vocab, says in (({}, "has 0 tokens"), ({"a": 2**31}, r"has 1 tokens up to 2,147,483,648; it needs one to")):
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
        (tmp_path / "odd.json").write_text(json.dumps({"version": "1.0", "model": model}))
        with pytest.raises(ValueError, match=rf"odd\.json {says}"):
            HuggingFace(tmp_path / "odd.json")
    for content in (b"\xff\xfe{\0}\0", b"[" * 100_000, b"", b"null"):
        (tmp_path / "odd.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"odd\.json is no tokenizer\.json: [^\n]*$"):
            HuggingFace(tmp_path / "odd.json")


def test_tokens_that_end_a_text(tmp_path):
    """Zero is one, by itself and in a list; null and an empty list are none."""
    made_with().save(str(tmp_path / "tokenizer.json"))

    def read(of_config, of_generation=None):
        for name, given in (("config", of_config), ("generation_config", of_generation)):
            (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": given}))
        tokenizer = tokenizer_of(tmp_path, 10)
        return end_token(tmp_path), end_tokens(tmp_path, tokenizer), tokenizer.end

    assert read(0) == read([0], []) == (0, (0,), 0)
    assert read([9, 0]) == (9, (9, 0), 9)
    assert read(None) == (None, (9,), 9)
    assert read([9, 0], [7, 0]) == (9, (7, 0), 9)
    assert read([9, 0], 0) == (9, (0,), 9)
    for wrong in (-1, True, "</s>", 1.5, [0, None], 2**31):
        with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is"):
            read(0, wrong)
    assert end_tokens(tmp_path, Bytes()) == ()


def test_documents_that_end_with_zero(tmp_path):
    """Which is added once."""
    made = made_with()
    made.add_special_tokens(["<s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    found = tokenize([b"ab", b"ab <s>", b"<s>", b"<s> ab"], HuggingFace(tmp_path / "tokenizer.json", end=0)).documents
    assert isinstance(found, Documents)
    np.testing.assert_array_equal(found.tokens, [3, 0, 3, 0, 0, 0, 3, 0])
    np.testing.assert_array_equal(found.offsets, [0, 2, 4, 5, 8])
