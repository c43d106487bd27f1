"""The tokenizer and the data of `python -m models.train lm`."""

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path

from models.data.chat import Conversation, template_of
from models.data.text import Corpus, read_texts, split, standard_library, tokenize
from models.data.tokenizer import Bytes, HuggingFace, Tokenizer, tokenizer_of
from models.hf.config import end_token
from models.training.presets import Preset

CHAT_FILES = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def choose_tokenizer(preset: Preset) -> tuple[Preset, Tokenizer]:
    """The tokenizer, and the preset with its number of tokens."""
    folder, vocab = preset.init_from, preset.model.vocab
    if preset.tokenizer is not None:
        tokenizer = HuggingFace(Path(preset.tokenizer), None if folder is None else end_token(Path(folder)))
    else:
        tokenizer = Bytes() if folder is None else tokenizer_of(Path(folder), vocab)
    if folder is not None and tokenizer.vocab > vocab:
        raise ValueError(f"the tokenizer has {tokenizer.vocab:,} tokens, and the checkpoint in {folder} {vocab:,}.")
    model = dataclasses.replace(preset.model, vocab=max(vocab, tokenizer.vocab))
    return dataclasses.replace(preset, model=model), tokenizer


def checkpoint_folder(preset: Preset) -> Path | None:
    """Where the tokenizer and the chat template are."""
    folder = preset.init_from if preset.tokenizer is None else Path(preset.tokenizer).parent
    return None if folder is None else Path(folder)


def tokenizer_files(preset: Preset) -> list[Path]:
    """The files that make tokens of text and conversations; none for bytes."""
    folder = checkpoint_folder(preset)
    named = [] if preset.tokenizer is None else [Path(preset.tokenizer)]
    beside = [] if folder is None else [folder / name for name in ("tokenizer.json", *CHAT_FILES)]
    return list(dict.fromkeys([*named, *(file for file in beside if file.exists())]))


def read_corpus(
    data: Sequence[str], tokenizer: Tokenizer, *, raw: bool = False, folder: Path | None = None, context: int = 0,
    date: str | None = None,
) -> Corpus:  # fmt: skip
    """The data of `Preset.data`; the folder has the chat template, if conversations are among them."""
    if not data:
        return split(tokenize(standard_library(), tokenizer).documents)
    texts, source = read_texts(data, raw=raw), f"the data of {', '.join(data)}"
    first = next((text for text in texts if isinstance(text, Conversation)), None)
    if first is None:
        return split(tokenize(texts, tokenizer).documents, source)
    if folder is None:
        raise ValueError(
            f"{first.source} is a conversation, which needs a chat template: pass --init-from with a checkpoint that "
            "has one, or --tokenizer with one beside it."
        )
    template = template_of(folder, None if date is None else datetime.datetime.fromisoformat(date))
    found = tokenize(texts, tokenizer, template, context)
    return split(found.documents, source)._replace(remark=found.remark)
