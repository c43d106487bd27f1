"""What a trained `Multimodal` draws for prompts, and how it captions images."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.data.images import unpatchify
from models.dit.model import integrate
from models.multimodal.interleaved import Batch, Room, Tokens, captioned, illustrated, in_batches, lay_out, rows_of
from models.multimodal.model import Multimodal

Sizes = Sequence[tuple[int, int]]  # height and width in pixels


def draw(
    model: Multimodal, prompts: Sequence[np.ndarray], sizes: Sizes, tokens: Tokens, room: Room, key: jax.Array, *,
    steps: int, guidance: float,
) -> list[np.ndarray]:  # fmt: skip
    """An image for each prompt, uint8 [height, width, channels].

    By Heun's method with classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598): each image is drawn in two
    documents of one batch, after its prompt and after none. All batches share one compiled program.

    Args:
      prompts: text tokens of each.
      room: of a batch; two documents must fit.
      guidance: 1 for none.
    """
    graphdef, state = nnx.split(model)
    blanks = [np.zeros((height, width, room.channels), np.uint8) for height, width in sizes]
    nothing = np.zeros(0, np.int32)
    both = [
        (illustrated(prompt, blank, tokens), illustrated(nothing, blank, tokens))
        for prompt, blank in zip(prompts, blanks, strict=True)
    ]
    drawn: dict[int, np.ndarray] = {}
    for number, chosen in enumerate(in_batches(both, range(len(both)), room)):
        batch = lay_out([document for i in chosen for document in both[i]], room)
        guided, free = (np.arange(room.rows, dtype=np.int32) for _ in range(2))
        spans = []
        for place, i in enumerate(chosen):
            ends = batch.sequence_offsets[2 * place + 1 : 2 * place + 3]
            after, alone = (np.arange(end - rows_of(blanks[i], room.patch), end) for end in ends.tolist())
            guided[alone], free[after] = after, alone
            spans.append(after)
        own_key = jax.random.fold_in(key, number)
        patches = np.asarray(_drawn(graphdef, state, batch, guided, free, own_key, steps, guidance))
        for i, span in zip(chosen, spans, strict=True):
            grid = [side // room.patch for side in sizes[i]]
            drawn[i] = unpatchify(patches[span], grid, room.patch)
    return [drawn[i] for i in range(len(prompts))]


@functools.partial(jax.jit, static_argnums=(0, 6))
def _drawn(
    graphdef: nnx.GraphDef, state: nnx.State, batch: Batch, guided: jax.Array, free: jax.Array, key: jax.Array,
    steps: int, guidance: float | jax.Array,
) -> jax.Array:  # fmt: skip
    """Patches [T, ...] of all images, equal in both documents of each.

    Args:
      guided, free: of each row the same patch's row after the prompt, and after none; of rows of text their own.
    """
    model = nnx.merge(graphdef, state)

    def velocity(patches: jax.Array, time: jax.Array) -> jax.Array:
        x, _ = model(batch._replace(patches=patches), jnp.full(batch.is_image.shape, time))
        found = model.velocities(x)
        return found[free] + guidance * (found[guided] - found[free])

    return integrate(velocity, jax.random.normal(key, batch.patches.shape)[guided], steps)


def caption(
    model: Multimodal, images: Sequence[np.ndarray], tokens: Tokens, room: Room, key: jax.Array, *, length: int,
    temperature: float,
) -> list[list[int]]:  # fmt: skip
    """Text tokens for each image, at most `length`, up to the end of the document.

    Each new token takes a pass over the batch: no keys and values are cached.

    Args:
      images: uint8 [height, width, channels] each.
      room: of a batch; one document must fit.
      temperature: 0 for the likeliest token.
    """
    graphdef, state = nnx.split(model)
    empty = np.zeros(length, np.int32)
    documents = [[captioned(empty, image, tokens)] for image in images]
    found: dict[int, list[int]] = {}
    for number, chosen in enumerate(in_batches(documents, range(len(documents)), room)):
        batch = lay_out([document for i in chosen for document in documents[i]], room)
        ends = batch.sequence_offsets[1 : 1 + room.documents]
        at, own_key = ends - length - 1, jax.random.fold_in(key, number)
        written = np.asarray(_written(graphdef, state, batch, at, own_key, length, temperature))
        found |= {i: until(tokens, row.tolist()) for i, row in zip(chosen, written, strict=False)}
    return [found[i] for i in range(len(images))]


@functools.partial(jax.jit, static_argnums=(0, 5))
def _written(
    graphdef: nnx.GraphDef, state: nnx.State, batch: Batch, rows: jax.Array, key: jax.Array, length: int,
    temperature: float | jax.Array,
) -> jax.Array:  # fmt: skip
    """`length` tokens after each of rows [D]."""
    model, time = nnx.merge(graphdef, state), jnp.zeros(batch.is_image.shape)

    def step(tokens: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        place, key = at
        x, _ = model(batch._replace(tokens=tokens), time)
        logits = model.logits(x[rows + place])
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=1)).astype(jnp.int32)
        return tokens.at[rows + place + 1].set(token, mode="drop"), token

    steps = jnp.arange(length, dtype=jnp.int32), jax.random.split(key, length)
    return jax.lax.scan(step, batch.tokens, steps)[1].T


def lowered_programs(
    model: Multimodal, room: Room, key: jax.Array, *, steps: int, guidance: float, length: int, temperature: float
) -> Iterator[jax.stages.Lowered]:
    """The programs of `draw` and `caption`, for a model of `jax.ShapeDtypeStruct`s."""
    graphdef, state = nnx.split(model)
    batch, rows = lay_out([], room), np.zeros(room.rows, np.int32)
    yield _drawn.lower(graphdef, state, batch, rows, rows, key, steps, guidance)
    yield _written.lower(graphdef, state, batch, rows[: room.documents], key, length, temperature)


def until(tokens: Tokens, written: list[int]) -> list[int]:
    """Up to the first token that is no text."""
    return written[: next((i for i, token in enumerate(written) if token in tokens), None)]
