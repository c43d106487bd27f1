"""Text from a checkpoint: `python -m models.generate FOLDER "once upon a time" "another prompt"`."""

import pathlib
from collections.abc import Sequence
from typing import Annotated, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx

from models import hf
from models.decoder import Decoder
from models.hf_config import end_token, read_config
from models.precision import DTYPES

TOGETHER = 1_000  # texts that are encoded at once: what the library keeps of each token is much more than its number
# Names of the token that ends a text.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """Text to tokens and back.

    Attributes:
      vocab: tokens there are.
      end: the token that ends a document of training data, or None.
    """

    vocab: int
    end: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode_all(self, texts: Sequence[bytes]) -> list[np.ndarray]: ...


class Bytes:
    """Each byte of UTF-8 is a token; zero, which no text has, ends a text."""

    vocab: int = 256
    end: int | None = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(
            errors="replace"
        )  # a model may have more than it was trained on

    def encode_all(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]


class HuggingFace:
    """The tokenizer of a tokenizer.json; texts end with `end`, by default the first of `ENDS` in its vocabulary.

    Raises:
      ValueError: a file that cannot be read, or is no tokenizer.json.
    """

    def __init__(self, file: pathlib.Path, end: int | None = None):
        import tokenizers  # only where there is one

        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file} is no tokenizer.json: {error}") from error
        self.vocab = 1 + max(self.tokenizer.get_vocab().values())
        known = (self.tokenizer.token_to_id(name) for name in ENDS)
        self.end: int | None = next((token for token in known if token is not None), None) if end is None else end

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens))

    def encode_all(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """
        Raises:
          ValueError: a text that is not UTF-8.
        """
        found = []
        for some in (texts[at : at + TOGETHER] for at in range(0, len(texts), TOGETHER)):
            found += [
                np.array(encoded.ids, np.int64)
                for encoded in self.tokenizer.encode_batch_fast([_decode(text) for text in some])
            ]
        return found


def _decode(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the document that begins with {text[:60]!r} is not UTF-8, and --tokenizer needs text: {error}."
        ) from error


def check_length(prompts: Sequence[Sequence[int]], length: int, heads: int, limit: int) -> None:
    """Attention over a prompt needs a number for each head and each pair of a prompt token and a token of the row.

    Raises:
      ValueError: rows of more than `limit` tokens.
    """
    longest = max(map(len, prompts), default=0)
    if longest + length > limit:
        gigabytes = 4 * len(prompts) * heads * longest * (longest + length) / 1e9
        raise ValueError(
            f"the longest prompt has {longest:,} tokens and --length is {length:,}: more than the limit of {limit:,} "
            "together. "
            f"Shorten it, or pass --limit {longest + length}: attention would take {gigabytes:,.1f} GB and more."
        )


def tokenizer_of(folder: pathlib.Path, vocab: int) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
      ValueError: no tokenizer.json, and fewer tokens than bytes.
    """
    file = folder / "tokenizer.json"
    if file.exists():
        return HuggingFace(file, end_token(folder))
    if vocab < 256:
        raise ValueError(f"{folder} has no tokenizer.json, and with {vocab} tokens the model knows no bytes.")
    return Bytes()


class Prompts(NamedTuple):
    """tokens [B, T], right-aligned; first [B], where they start."""

    tokens: jax.Array
    first: jax.Array


def align(prompts: Sequence[Sequence[int]]) -> Prompts:
    """Right-aligned prompts.

    Raises:
      ValueError: an empty prompt.
    """
    if not prompts or not all(prompts):
        raise ValueError("a prompt has no tokens: write one at least.")
    longest = max(map(len, prompts))
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[longest - len(prompt) :] = prompt
    return Prompts(jnp.asarray(tokens), jnp.asarray([longest - len(prompt) for prompt in prompts], jnp.int32))


def generate(
    model: Decoder,
    prompts: Prompts,
    key: jax.Array,
    length: int,
    temperature: float | jax.Array = 0.0,
    end: int | jax.Array = -1,
) -> jax.Array:
    """Continuations [B, length] of the prompts: one pass over the prompts, then a token of each row at a time.

    Keys and values are cached. Call it under jit, with `length` static.

    Args:
      temperature: 0 for the likeliest token.
      end: the token after which a row is filled with it; -1 for none.
    """
    B, T = prompts.tokens.shape
    logits, cache = model.extend(prompts.tokens, model.empty_cache(B, T + length), jnp.int32(0), prompts.first)

    def pick(logits: jax.Array, key: jax.Array) -> jax.Array:
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)

    def step(carry, key):
        token, at, cache = carry
        logits, cache = model.extend(token[:, None], cache, at, prompts.first)
        token = jnp.where(token == end, end, pick(logits, key))
        return (token, at + 1, cache), token

    keys = jax.random.split(key, length)
    first = pick(logits, keys[0])
    _, others = jax.lax.scan(step, (first, jnp.int32(T), cache), keys[1:])
    return jnp.concatenate([first[None], others]).T


def sample(
    model: Decoder, prompts: Prompts, key: jax.Array, length: int, temperature: float = 0.0, end: int = -1
) -> np.ndarray:
    """`generate`, compiled."""
    graphdef, state = nnx.split(model)
    run = jax.jit(
        lambda state, *given: generate(nnx.merge(graphdef, state), Prompts(*given[:2]), given[2], length, given[3], end)
    )
    return np.asarray(run(state, *prompts, key, jnp.float32(temperature)))


def main(
    folder: Annotated[
        pathlib.Path,
        typer.Argument(help="A checkpoint: config.json, safetensors, and tokenizer.json unless its tokens are bytes."),
    ],
    prompt: Annotated[list[str], typer.Argument(help="One or more.")],
    length: Annotated[int, typer.Option(min=1, help="Tokens to add to each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"Of the computation: {', '.join(DTYPES)}.")] = "float32",
    limit: Annotated[int, typer.Option(min=1, help="The most tokens of a prompt and what is added to it.")] = 8192,
) -> None:
    """Continues each prompt."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(DTYPES)}.", param_hint="--dtype")
    try:
        _, config = read_config(folder)
        tokenizer = tokenizer_of(folder, config.vocab)
        encoded = [tokenizer.encode(text) for text in prompt]
        check_length(encoded, length, config.heads, limit)
        prompts = align(encoded)
        if (highest := int(prompts.tokens.max())) >= config.vocab:
            raise ValueError(f"{folder}: the tokenizer's token {highest:,} is none of the model's {config.vocab:,}.")
        _, model = hf.load(folder, dtype=dtype)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    model.eval()
    end = -1 if tokenizer.end is None or isinstance(tokenizer, Bytes) else tokenizer.end
    for text, tokens in zip(
        prompt, sample(model, prompts, jax.random.key(seed), length, temperature, end), strict=True
    ):
        stop = tokens.tolist().index(end) if end in tokens else len(tokens)
        typer.echo(text + tokenizer.decode(tokens[:stop].tolist()))


if __name__ == "__main__":
    typer.run(main)
