"""Tokens to text as they come, up to a stop word."""

from collections.abc import Sequence

from models.data.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what a part of a character is decoded to


class TextStream:
    """The text of a row's tokens: what decoding them after the prompt adds to the prompt's text.

    No character is given in parts, and nothing of a stop word. A token's text depends on whether tokens are before it,
    and on the character that it completes. So it is decoded after the last tokens that had text and ended with a whole
    character.

    `text` is what `add` and `finish` have returned, `stopped` whether a stop word was found, before which it ends. Stop
    words may begin and end within tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        if not all(stops):
            raise ValueError("a stop word is empty: leave it out.")
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._begin(prompt)
        self._held, self.text, self.stopped = "", "", False

    def add(self, token: int) -> str:
        """The text that is certain now."""
        if self.stopped:
            return ""
        self._pending.append(token)
        if len(self._pending) < self._next:
            return ""
        new = self._decoded()
        if not new or new.endswith(INCOMPLETE):
            # In an endless run of such tokens not each one is followed by decoding them all.
            self._next = len(self._pending) + 1 + len(self._pending) // 8
            return ""
        self._begin(self._pending)
        return self._give(new)

    def finish(self) -> str:
        """The rest, after the last token."""
        rest = "" if self.stopped else self._give(self._decoded())
        held, self._held = self._held, ""
        self.text += held
        return rest + held

    def _begin(self, context: Sequence[int]) -> None:
        self._context, self._pending, self._next = list(context), list[int](), 1
        self._known = len(self._tokenizer.decode(self._context))

    def _decoded(self) -> str:
        """Of the pending tokens."""
        return self._tokenizer.decode(self._context + self._pending)[self._known :]

    def _give(self, new: str) -> str:
        text = self._held + new
        if found := [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stops if stop in text]:
            self.stopped, certain, self._held = True, text[: min(found)[1]], ""
        else:
            kept = max((_overlap(text, stop) for stop in self._stops), default=0)
            certain, self._held = text[: len(text) - kept], text[len(text) - kept :]
        self.text += certain
        return certain


def _overlap(text: str, stop: str) -> int:
    """How much of the end of text may be the beginning of stop."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
