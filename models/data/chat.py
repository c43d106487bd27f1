"""Conversations as text, by the chat template of a checkpoint, and where the assistant's words stand in it.

Templates are programs in Jinja that come with a checkpoint. They run in Jinja's sandbox and see what transformers gives
them: its names, filters, options and special tokens.
"""

import datetime
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np

from models.data.text_files import check_text
from models.data.tokenizer import Tokenizer
from models.hf.config import read_json

ROLES = ("system", "developer", "user", "assistant", "tool")
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same; templates read the first or the second
# Around the assistant's words while they are looked for. Unicode will never give these a meaning.
BEGIN, END = "\ufdd0", "\ufdd1"

Message = dict[str, Any]
Span = tuple[int, int]


class Conversation(NamedTuple):
    """Messages of "role" and "content", descriptions of functions for the template, and a name for errors."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    source: str


def conversation(line: dict[str, Any], source: str) -> Conversation:
    """Of a line of data with "messages", and perhaps "tools"."""
    messages, tools = line["messages"], line.get("tools")

    def needs(holds: Any, what: str, given: Any, needed: str) -> None:
        if not holds:
            raise ValueError(f"{source}{what} is {repr(given)[:80]}; it must be {needed}.")

    needs(isinstance(messages, list) and messages, ': "messages"', messages, "a list of messages, one at least")
    is_tools = tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))
    needs(is_tools, ': "tools"', tools, "a list of objects")
    for number, message in enumerate(messages):
        where = f", message {number}"
        needs(isinstance(message, dict), where, message, '{"role": ..., "content": ...}')
        needs(message.get("role") in ROLES, f"{where}: the role", message.get("role"), f"one of {', '.join(ROLES)}")
        content = message.get("content")
        is_text = isinstance(content, str) and not (BEGIN in content or END in content)
        is_call = content is None and message.get("tool_calls")
        needs(is_text or is_call, f"{where}: the content", content, f"text, without {BEGIN!r} and {END!r}")
    return Conversation(messages, tools, source)


class Rendered(NamedTuple):
    """A conversation as text, and the characters [start, end) of the assistant's words.

    Unless the template says where they are, by_marks, a span may end with white space between two turns.
    """

    text: str
    spans: list[Span]
    by_marks: bool


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: the assistant's words, marked if `environment.marks`."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's name

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        environment.extend(marks=False)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}" if vars(self.environment)["marks"] else caller()


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter would escape <, > and &."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class ChatTemplate:
    """A chat template, of its source in Jinja.

    Args:
      tokens: the names that it may use for special tokens, such as bos_token.
      file: its name in errors.
      now: the time that it sees, by default that of this call: one time for all that it renders.
    """

    def __init__(self, source: str, tokens: dict[str, str], file: str, now: datetime.datetime | None = None):
        self._tokens, self._file = tokens, file
        self._has_marks = "endgeneration" in source
        self._environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self._environment.filters["tojson"] = _to_json
        now = datetime.datetime.now() if now is None else now
        self._environment.globals |= {"raise_exception": _raise, "strftime_now": now.strftime}
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{file}: the chat template cannot be parsed: {error}") from error

    def render(self, messages: Sequence[Message], *, prompt: bool = False, tools: Any = None) -> str:
        """The text of a conversation; prompt: whether what begins an answer is added."""
        given = {"messages": [_with_reasoning(message) for message in messages], "tools": tools, "documents": None}
        try:
            text = self._template.render(**given, add_generation_prompt=prompt, **self._tokens)
        except Exception as error:  # a template is a program: anything can fail in it
            raise ValueError(f"{self._file}: the chat template says: {error}") from error
        return check_text(text, f"{self._file}: the conversation's text")

    def mark(self, given: Conversation) -> Rendered:
        """A conversation with the assistant's words.

        These are what the template puts between {% generation %} and {% endgeneration %}. Without such marks each
        message of the assistant is what its rendering adds to the messages before it and the beginning of an answer.

        Raises:
          ValueError: as of `render`; no message of the assistant; a template without marks that renders the first
            messages of a conversation differently from the whole.
        """
        try:
            if not any(message["role"] == "assistant" for message in given.messages):
                raise ValueError("there is no message of the assistant, whose words are what is learned.")
            return self._by_marks(given) if self._has_marks else self._by_prefixes(given)
        except ValueError as error:
            raise ValueError(f"{given.source}: {error}") from error

    def _by_marks(self, given: Conversation) -> Rendered:
        vars(self._environment)["marks"] = True
        try:
            parts = self.render(given.messages, tools=given.tools).replace(END, BEGIN).split(BEGIN)
        finally:
            vars(self._environment)["marks"] = False
        text, edges = "".join(parts), np.cumsum([len(part) for part in parts]).tolist()
        if text != self.render(given.messages, tools=given.tools):
            raise ValueError(f"{self._file} changes the text between {{% generation %}} and {{% endgeneration %}}.")
        spans = [(start, end) for start, end in zip(edges[:-1:2], edges[1::2], strict=False) if start < end]
        return Rendered(text, spans, True)

    def _by_prefixes(self, given: Conversation) -> Rendered:
        messages, spans = given.messages, list[Span]()
        text = self.render(messages, tools=given.tools)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:number], prompt=True, tools=given.tools)
            after = self.render(messages[: number + 1], tools=given.tools)
            # The last turn may end with another token than those before it: that one is not what is learned.
            end = sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(after, text, strict=False)))
            answer = (message.get("content") or "").strip()
            if not text.startswith(before) or answer not in text[len(before) : end]:
                raise ValueError(
                    f"message {number}: {self._file} renders the conversation up to here differently from the whole "
                    "conversation, so the assistant's words cannot be found. Put {% generation %} and "
                    "{% endgeneration %} around them in the template."
                )
            spans.append((len(before), end))
        return Rendered(text, spans, False)


def _with_reasoning(message: Message) -> Message:
    """With what a model thought before its answer under each name that templates read."""
    thoughts = [message[name] for name in REASONING if message.get(name) is not None]
    if not thoughts:
        return message
    given = message.get("thinking")
    return message | {"thinking": thoughts[0] if given is None else given, "reasoning_content": thoughts[0]}


def template_of(folder: pathlib.Path, now: datetime.datetime | None = None) -> ChatTemplate:
    """The chat template of a checkpoint: its chat_template.jinja, or "chat_template" in its tokenizer_config.json."""
    file, beside = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json(file) if file.exists() else {}
    source, where = config.get("chat_template"), file
    if beside.exists():
        source, where = beside.read_text("utf-8"), beside
    if isinstance(source, list):
        source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}.get("default")
    if not isinstance(source, str):
        raise ValueError(
            f'{folder} has no chat template: neither a chat_template.jinja nor a "chat_template" in {file.name}. Copy '
            "those of the checkpoint that was trained on conversations."
        )
    named = {name: config.get(name) for name in TOKEN_NAMES}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    texts = {name: text for name, text in contents.items() if isinstance(text, str)}
    return ChatTemplate(source, texts, str(where), now)


class Marked(NamedTuple):
    """tokens of a conversation, [N]; scored [N] bool: those that the assistant wrote."""

    tokens: np.ndarray
    scored: np.ndarray


def encode(tokenizer: Tokenizer, rendered: Rendered) -> Marked:
    """The tokens of a conversation, and which of them lie in its spans.

    A span begins with a token, as it does after a prompt: where a token would cover its edge, the text before it is
    encoded by itself. White space after a span's last special token is not scored, unless the template marks it: the
    turn has ended.
    """
    text, spans, by_marks = rendered
    tokens, covers = tokenizer.encode_rendered(text)
    edges = [start for start, _ in spans if np.any((covers[:, 0] < start) & (start < covers[:, 1]))]
    if edges:
        parts = [(start, text[start:end]) for start, end in zip([0, *edges], [*edges, len(text)], strict=True)]
        encoded = [(start, *tokenizer.encode_rendered(part)) for start, part in parts]
        tokens = [token for _, own, _ in encoded for token in own]
        covers = np.concatenate([start + own for start, _, own in encoded])
    scored = np.zeros(len(tokens), bool)
    for start, end in spans:
        (inside,) = np.nonzero((start <= covers[:, 0]) & (covers[:, 1] <= end) & (covers[:, 0] < covers[:, 1]))
        last = max((place for place in inside if tokens[place] in tokenizer.special), default=None)
        if not by_marks and last is not None and not text[covers[last, 1] : end].strip():
            inside = inside[inside <= last]
        scored[inside] = True
    return Marked(np.array(tokens, np.int64), scored)
