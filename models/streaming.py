"""Tokens to text as they come, up to a stop word."""

from collections.abc import Sequence

from models.tokenizer import Tokenizer

CONTEXT = 8  # tokens before the new ones that are decoded with them: a character has 4 at most
INCOMPLETE = "\ufffd"  # what a part of a character is decoded to


class TextStream:
    """The text of a row's tokens. No character is given in parts, and nothing of a stop word.

    Attributes:
      text: what `add` and `finish` have returned.
      stopped: whether a stop word was found. The text ends before it.

    Args:
      prompt: the tokens before: some tokenizers write a word's first token differently at the start of a text.
      stops: the stop words; one may begin and end within tokens.

    Raises:
      ValueError: an empty stop word.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        if not all(stops):
            raise ValueError("a stop word is empty: leave it out.")
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._context, self._pending, self._held = list(prompt[-CONTEXT:]), list[int](), ""
        self.text, self.stopped = "", False

    def add(self, token: int) -> str:
        """The text that is certain now."""
        if self.stopped:
            return ""
        self._pending.append(token)
        new = self._decoded()
        if not new or new.endswith(INCOMPLETE):
            return ""
        return self._give(new)

    def finish(self) -> str:
        """The rest, after the last token."""
        rest = "" if self.stopped else self._give(self._decoded())
        held, self._held = self._held, ""
        self.text += held
        return rest + held

    def _decoded(self) -> str:
        """Of the pending tokens."""
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]

    def _give(self, new: str) -> str:
        self._context, self._pending = (self._context + self._pending)[-CONTEXT:], []
        text = self._held + new
        if found := [text.index(stop) for stop in self._stops if stop in text]:
            self.stopped, certain, self._held = True, text[: min(found)], ""
        else:
            kept = max((_overlap(text, stop) for stop in self._stops), default=0)
            certain, self._held = text[: len(text) - kept], text[len(text) - kept :]
        self.text += certain
        return certain


def _overlap(text: str, stop: str) -> int:
    """How much of the end of text may be the beginning of stop."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
