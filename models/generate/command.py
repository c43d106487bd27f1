"""Text from a checkpoint: `python -m models.generate FOLDER "once upon a time" "another prompt"`."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import typer

from models import hf
from models.data.chat import ChatTemplate, conversation, template_of
from models.data.text_files import check_text, is_json_lines, json_lines, lines_of
from models.data.tokenizer import Tokenizer, end_tokens, tokenizer_of
from models.decoder import Decoder
from models.generate.inference import for_inference
from models.generate.sampling import Sampling
from models.generate.slots import Batching, Completion, check_prompts, completions
from models.generate.streaming import TextStream
from models.hf.config import read_config
from models.precision import DTYPES
from models.training.config import command, errors_of_options


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    folder: Annotated[
        pathlib.Path,
        typer.Argument(help="A checkpoint: config.json, safetensors, and tokenizer.json unless its tokens are bytes."),
    ]
    prompt: Annotated[
        list[str] | None, typer.Argument(help="One or more. With --chat and without any: a conversation.")
    ] = None
    prompts: Annotated[
        pathlib.Path | None,
        typer.Option(help='More prompts: a line each, or .jsonl lines with "prompt" or "messages". Writes JSON lines.'),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are a user's messages, for the checkpoint's chat template.")
    ] = False
    length: Annotated[int, typer.Option(min=1, help="Tokens to add to each prompt, at the most.")] = 64
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time.")] = 0.0
    top_k: Annotated[int, typer.Option(min=0, help="Draw from so many likeliest tokens. 0: from all.")] = 0
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens that have this probability together. 1: from all.")
    ] = 1.0
    stop: Annotated[list[str] | None, typer.Option(help="Text before which an output ends; repeatable.")] = None
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0
    dtype: Annotated[str, typer.Option(help=f"Of the computation: {', '.join(DTYPES)}.")] = "float32"
    limit: Annotated[int, typer.Option(min=1, help="The most tokens of a prompt and what is added to it.")] = 8192
    slots: Annotated[int, typer.Option(min=1, help="Prompts that are continued together.")] = Batching.slots
    ignore_config: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Unknown key of config.json to go on without; repeatable."),
    ] = None


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
      given: its text or its messages, for what is written about it.
      text: what the model reads.
      tokens: of the text.
    """

    given: Any
    text: str
    tokens: list[int]


@dataclasses.dataclass(frozen=True)
class Writer:
    """A checkpoint and how text is drawn from it."""

    model: Decoder
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    options: GenerateOptions

    def write(self, prompts: Sequence[Prompt]) -> list[tuple[str, Completion]]:
        """The text and completion of each prompt, written as they come and in the prompts' order.

        Of prompts from a file each is a JSON line; the others are written to the terminal while they are drawn.
        """
        options, done = self.options, dict[int, Completion]()
        streams = [TextStream(self.tokenizer, prompt.tokens, options.stop or ()) for prompt in prompts]
        self._begin(prompts, 0)
        shown = 0

        def watch(number: int, token: int) -> bool:
            new = streams[number].add(token)
            if number == shown:
                self._show(new)
            return streams[number].stopped

        found = completions(
            self.model,
            [prompt.tokens for prompt in prompts],
            options.length,
            sampling=sampling_of(options),
            key=jax.random.key(options.seed),
            ends=self.ends,
            batching=Batching(slots=options.slots),
            watch=watch,
        )
        for number, completion in found:
            rest, done[number] = streams[number].finish(), completion
            if number == shown:
                self._show(rest)
            while shown in done:
                self._finish(prompts[shown], streams[shown], done[shown])
                shown += 1
                self._begin(prompts, shown)
                if shown < len(prompts):
                    self._show(streams[shown].text)
        return [(stream.text, done[number]) for number, stream in enumerate(streams)]

    def _show(self, text: str) -> None:
        if self.options.prompts is None:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _begin(self, prompts: Sequence[Prompt], number: int) -> None:
        if number < len(prompts) and not self.options.chat:
            self._show(prompts[number].text)

    def _finish(self, prompt: Prompt, stream: TextStream, completion: Completion) -> None:
        self._show("\n")
        if self.options.prompts is not None:
            ended = "stop" if stream.stopped else completion.ended
            line = {"prompt": prompt.given, "text": stream.text, "tokens": len(completion.tokens), "ended": ended}
            # JSON can do without the characters that the standard output cannot show.
            typer.echo(json.dumps(line, ensure_ascii="utf" not in (sys.stdout.encoding or "utf").lower()))


def sampling_of(options: GenerateOptions) -> Sampling:
    return Sampling(options.temperature, options.top_k, options.top_p)


def check_length(prompts: Sequence[Sequence[int]], options: GenerateOptions) -> None:
    """
    Raises:
      ValueError: rows of more than `limit` tokens.
    """
    longest = max(map(len, prompts), default=0)
    if longest + options.length > options.limit:
        raise ValueError(
            f"the longest prompt has {longest:,} tokens and --length is {options.length:,}: more than the limit of "
            f"{options.limit:,} together. Shorten it, or pass --limit {longest + options.length}."
        )


def read_prompts(options: GenerateOptions, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[Prompt]:
    """All prompts.

    Raises:
      ValueError: a line without one; messages without --chat.
    """
    given: list[Any] = [check_text(text, f"prompt {number}") for number, text in enumerate(options.prompt or [])]
    if options.prompts is not None:
        given += prompts_of(options.prompts)
    return [prompt_of(one, tokenizer, template) for one in given]


def prompts_of(file: pathlib.Path) -> list[Any]:
    """The text of each line, or of a .jsonl file also its messages.

    Raises:
      OSError: as of `models.data.text_files.read_bytes`.
      ValueError: no text; a line of a .jsonl file that is no object with "prompt" or "messages"; bad messages; no line.
    """
    found: list[Any] = []
    if is_json_lines(file):
        for line in json_lines(file, 'a "prompt" that is a string, or with "messages"'):
            chat = "messages" in line.given
            found.append(
                conversation(line.checked("messages", "tools"), line.source).messages if chat else line.text("prompt")
            )
    else:
        found += [check_text(line, f"{source}: the prompt") for source, line in lines_of(file)]
    if not found:
        raise ValueError(f"{file} has no line with a prompt: write one, or leave it out.")
    return found


def prompt_of(given: Any, tokenizer: Tokenizer, template: ChatTemplate | None) -> Prompt:
    """
    Args:
      given: text, or messages.
      template: writes text as a user's message, and messages; None for text as it is.
    """
    if template is None:
        if not isinstance(given, str):
            raise ValueError("a prompt has messages, which need the checkpoint's chat template: pass --chat.")
        return Prompt(given, given, tokenizer.encode(given))
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    text = template.render(messages, prompt=True)
    return Prompt(given, text, tokenizer.encode_rendered(text)[0])


def converse(writer: Writer, template: ChatTemplate) -> None:
    """Answers each line of the standard input, as one conversation."""
    messages = []
    while (line := _next_line()) is not None:
        messages.append({"role": "user", "content": line})
        prompt = prompt_of(messages, writer.tokenizer, template)
        check_length([prompt.tokens], writer.options)
        ((text, _),) = writer.write([prompt])
        messages.append({"role": "assistant", "content": text})


def _next_line() -> str | None:
    try:
        return check_text(input("> " if sys.stdin.isatty() else ""), "the line")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is no text in the terminal's encoding: {error}.") from error


def run(options: GenerateOptions) -> None:
    """Continues each prompt."""
    if options.dtype not in DTYPES:
        raise typer.BadParameter(f"{options.dtype!r} is not one of {', '.join(DTYPES)}.", param_hint="--dtype")
    with errors_of_options():
        ignored = options.ignore_config or ()
        _, config = read_config(options.folder, ignore_config=ignored)
        tokenizer = tokenizer_of(options.folder, config.vocab)
        template = template_of(options.folder) if options.chat else None
        sampling_of(options)
        TextStream(tokenizer, [], [check_text(stop, "--stop") for stop in options.stop or ()])
        prompts = read_prompts(options, tokenizer, template)
        if not prompts and template is None:
            raise ValueError("there is no prompt: write one, or pass --prompts FILE, or --chat for a conversation.")
        check_length([prompt.tokens for prompt in prompts], options)
        check_prompts([prompt.tokens for prompt in prompts], config.vocab)
        _, model = hf.load(options.folder, ignore_config=ignored, dtype=options.dtype, param_dtype=options.dtype)
        model = for_inference(model, consume=True)
        writer = Writer(model, tokenizer, end_tokens(options.folder, tokenizer), options)
    if prompts:
        writer.write(prompts)
    elif template is not None:
        with errors_of_options():
            converse(writer, template)


main = command(GenerateOptions, run)
app = typer.Typer(add_completion=False, rich_markup_mode=None)  # errors as of `models.train`
app.command()(main)
