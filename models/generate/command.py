"""Text from a checkpoint: `python -m models.generate FOLDER "once upon a time" "another prompt"`."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

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
from models.training.config import check_option, command, errors_of_options, option


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    folder: Annotated[
        pathlib.Path,
        typer.Argument(help="A checkpoint: config.json, safetensors, and tokenizer.json unless its tokens are bytes."),
    ]
    prompt: Annotated[
        list[str] | None, typer.Argument(help="One or more. With --chat and without any: a conversation.")
    ] = None
    prompts: pathlib.Path | None = option(
        None, 'More prompts: a line each, or .jsonl lines with "prompt" or "messages". Writes JSON lines.'
    )
    chat: bool = option(False, "Prompts are a user's messages, for the checkpoint's chat template.")
    length: int = option(64, "Tokens to add to each prompt, at the most.", min=1)
    temperature: float = option(0.0, "0: the likeliest token each time.", min=0.0)
    top_k: int = option(0, "Draw from so many likeliest tokens. 0: from all.", min=0)
    top_p: float = option(1.0, "Draw from the likeliest tokens that have this probability together. 1: from all.")
    stop: list[str] | None = option(None, "Text before which an output ends; repeatable.")
    seed: int = option(0, "Of what is drawn.")
    dtype: str = option("float32", f"Of the computation: {', '.join(DTYPES)}.")
    limit: int = option(8192, "The most tokens of a prompt and what is added to it.", min=1)
    slots: int = option(Batching.slots, "Prompts that are continued together.", min=1)
    ignore_config: list[str] | None = option(None, "Unknown key of config.json to go on without.", metavar="KEY")


class Prompt(NamedTuple):
    """A prompt as it was given, text or messages; the text that the model reads, and its tokens."""

    given: Any
    text: str
    tokens: list[int]


@dataclasses.dataclass(frozen=True)
class Writer:
    """A checkpoint and how text is drawn from it; without a template text is read as it is."""

    options: GenerateOptions
    tokenizer: Tokenizer
    template: ChatTemplate | None
    model: Decoder | None = None  # not until all else is checked

    def prompt(self, given: Any) -> Prompt:
        """Of text, or messages."""
        if self.template is None:
            if not isinstance(given, str):
                raise ValueError("a prompt has messages, which need the checkpoint's chat template: pass --chat.")
            return Prompt(given, given, self.tokenizer.encode(given))
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        text = self.template.render(messages, prompt=True)
        return Prompt(given, text, self.tokenizer.encode_rendered(text)[0])

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuses rows of more than `limit` tokens."""
        longest, length = max((len(prompt.tokens) for prompt in prompts), default=0), self.options.length
        if longest + length > self.options.limit:
            raise ValueError(
                f"the longest prompt has {longest:,} tokens and --length is {length:,}: more than the limit of "
                f"{self.options.limit:,} together. Shorten it, or pass --limit {longest + length}."
            )

    def write(self, prompts: Sequence[Prompt]) -> list[str]:
        """The text of each prompt, written as it comes and in the prompts' order.

        Of prompts from a file each is a JSON line; the others are written to the terminal while they are drawn.
        """
        options, done, shown = self.options, dict[int, Completion](), 0
        streams = [TextStream(self.tokenizer, prompt.tokens, options.stop or ()) for prompt in prompts]
        assert self.model is not None

        def begin() -> None:
            if shown < len(prompts):
                self._show(("" if options.chat else prompts[shown].text) + streams[shown].text)

        def watch(number: int, token: int) -> bool:
            new = streams[number].add(token)
            if number == shown:
                self._show(new)
            return streams[number].stopped

        begin()
        how = {"sampling": sampling_of(options), "key": jax.random.key(options.seed), "watch": watch}
        how |= {"ends": end_tokens(options.folder, self.tokenizer), "batching": Batching(slots=options.slots)}
        found = completions(self.model, [prompt.tokens for prompt in prompts], options.length, **how)
        for number, completion in found:
            rest, done[number] = streams[number].finish(), completion
            if number == shown:
                self._show(rest)
            while shown in done:
                self._finish(prompts[shown], streams[shown], done[shown])
                shown += 1
                begin()
        return [stream.text for stream in streams]

    def _show(self, text: str) -> None:
        if self.options.prompts is None:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _finish(self, prompt: Prompt, stream: TextStream, completion: Completion) -> None:
        self._show("\n")
        if self.options.prompts is not None:
            ended = "stop" if stream.stopped else completion.ended
            line = {"prompt": prompt.given, "text": stream.text, "tokens": len(completion.tokens), "ended": ended}
            # JSON can do without the characters that the standard output cannot show.
            typer.echo(json.dumps(line, ensure_ascii="utf" not in (sys.stdout.encoding or "utf").lower()))

    def converse(self) -> None:
        """Answers each line of the standard input, as one conversation."""
        messages = []
        while (line := _next_line()) is not None:
            messages.append({"role": "user", "content": line})
            prompt = self.prompt(messages)
            self.check([prompt])
            messages.append({"role": "assistant", "content": self.write([prompt])[0]})


def sampling_of(options: GenerateOptions) -> Sampling:
    return Sampling(options.temperature, options.top_k, options.top_p)


def prompts_of(file: pathlib.Path) -> list[Any]:
    """The text of each line, or of a .jsonl file also its messages."""
    found: list[Any] = []
    if is_json_lines(file):
        for line in json_lines(file, 'a "prompt" that is a string, or with "messages"'):
            chat = "messages" in line.given
            found.append(conversation(line.given, line.source).messages if chat else line.text("prompt"))
    else:
        found += [check_text(line, f"{source}: the prompt") for source, line in lines_of(file)]
    if not found:
        raise ValueError(f"{file} has no line with a prompt: write one, or leave it out.")
    return found


def _next_line() -> str | None:
    try:
        return check_text(input("> " if sys.stdin.isatty() else ""), "the line")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is no text in the terminal's encoding: {error}.") from error


def run(options: GenerateOptions) -> None:
    """Continues each prompt."""
    check_option("dtype", options.dtype, DTYPES)
    with errors_of_options():
        ignored = options.ignore_config or ()
        _, config = read_config(options.folder, ignore_config=ignored)
        tokenizer = tokenizer_of(options.folder, config.vocab)
        writer = Writer(options, tokenizer, template_of(options.folder) if options.chat else None)
        sampling_of(options)
        end_tokens(options.folder, tokenizer)
        TextStream(tokenizer, [], [check_text(stop, "--stop") for stop in options.stop or ()])
        given: list[Any] = [check_text(text, f"prompt {number}") for number, text in enumerate(options.prompt or [])]
        given += [] if options.prompts is None else prompts_of(options.prompts)
        if not given and not options.chat:
            raise ValueError("there is no prompt: write one, or pass --prompts FILE, or --chat for a conversation.")
        prompts = [writer.prompt(one) for one in given]
        writer.check(prompts)
        check_prompts([prompt.tokens for prompt in prompts], config.vocab)
        _, model = hf.load(options.folder, ignore_config=ignored, dtype=options.dtype, param_dtype=options.dtype)
        writer = dataclasses.replace(writer, model=for_inference(model, consume=True))
    if prompts:
        writer.write(prompts)
    else:
        with errors_of_options():
            writer.converse()


main = command(GenerateOptions, run)
app = typer.Typer(add_completion=False, rich_markup_mode=None)  # errors as of `models.train`
app.command()(main)
