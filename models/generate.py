"""Text from a checkpoint: `python -m models.generate FOLDER "once upon a time" "another prompt"`."""

import json
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


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """Each byte of UTF-8 is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class HuggingFace:
    """What a tokenizer.json says."""

    def __init__(self, file: pathlib.Path):
        import tokenizers  # only where there is one

        self.tokenizer = tokenizers.Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens))


def tokenizer_of(folder: pathlib.Path, vocab: int) -> Tokenizer:
    """
    Raises:
      ValueError: there is no tokenizer.json, and fewer tokens than bytes.
    """
    file = folder / "tokenizer.json"
    if file.exists():
        return HuggingFace(file)
    if vocab < 256:
        raise ValueError(f"{folder} has no tokenizer.json, and with {vocab} tokens the model knows no bytes.")
    return Bytes()


class Prompts(NamedTuple):
    """tokens [B, T], each row's at its end; first [B], where they begin."""

    tokens: jax.Array
    first: jax.Array


def align(prompts: Sequence[Sequence[int]]) -> Prompts:
    """
    Raises:
      ValueError: a prompt without tokens: there is nothing to go on from.
    """
    if not prompts or not all(prompts):
        raise ValueError("a prompt has no tokens: write one at least.")
    longest = max(map(len, prompts))
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[longest - len(prompt) :] = prompt
    return Prompts(jnp.asarray(tokens), jnp.asarray([longest - len(prompt) for prompt in prompts], jnp.int32))


def generate(model: Decoder, prompts: Prompts, key: jax.Array, length: int, temperature: float | jax.Array = 0.0, end: int | jax.Array = -1) -> jax.Array:
    """How each prompt goes on, [B, length]: the prompts in one pass, then one token of each row at a time, with keys and values kept. To be called under jit,
    with `length` static.

    Args:
      temperature: 0 for the likeliest token each time.
      end: after this token a row is filled up with it; -1 for none.
    """
    B, T = prompts.tokens.shape
    logits, cache = model.extend(prompts.tokens, model.empty_cache(B, T + length), jnp.int32(0), prompts.first)

    def pick(logits: jax.Array, key: jax.Array) -> jax.Array:
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)

    def step(carry, key):
        token, at, cache = carry
        logits, cache = model.extend(token[:, None], cache, at, prompts.first)
        token = jnp.where(token == end, end, pick(logits[:, 0], key))
        return (token, at + 1, cache), token

    keys = jax.random.split(key, length)
    first = pick(logits[:, -1], keys[0])
    _, others = jax.lax.scan(step, (first, jnp.int32(T), cache), keys[1:])
    return jnp.concatenate([first[None], others]).T


def sample(model: Decoder, prompts: Prompts, key: jax.Array, length: int, temperature: float = 0.0, end: int = -1) -> np.ndarray:
    """`generate`, compiled."""
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, *given: generate(nnx.merge(graphdef, state), Prompts(*given[:2]), given[2], length, given[3], end))
    return np.asarray(run(state, *prompts, key, jnp.float32(temperature)))


def main(
    folder: Annotated[pathlib.Path, typer.Argument(help="A checkpoint: config.json, safetensors, and tokenizer.json unless its tokens are bytes.")],
    prompt: Annotated[list[str], typer.Argument(help="One or more.")],
    length: Annotated[int, typer.Option(min=1, help="Tokens to add to each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the computation.")] = "float32",
) -> None:
    """Goes on from each prompt."""
    try:
        _, model = hf.load(folder, dtype=dtype)
        tokenizer = tokenizer_of(folder, model.config.vocab)
        prompts = align([tokenizer.encode(text) for text in prompt])
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error
    model.eval()
    end = json.loads((folder / "config.json").read_text()).get("eos_token_id")
    end = end if isinstance(end, int) and not isinstance(tokenizer, Bytes) else -1
    for text, tokens in zip(prompt, sample(model, prompts, jax.random.key(seed), length, temperature, end), strict=True):
        stop = tokens.tolist().index(end) if end in tokens else len(tokens)
        typer.echo(text + tokenizer.decode(tokens[:stop].tolist()))


if __name__ == "__main__":
    typer.run(main)
