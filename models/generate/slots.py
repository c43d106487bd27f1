"""Generation in a continuous batch: a fixed number of rows on the device, each of which takes a next prompt when free.

Two kinds of programs run. `_prefill` puts pieces of prompts into their rows; pieces have few lengths. `advance` draws
several tokens of all rows at once, each at its own position, until none is left to draw. The host waits once for each
`advance`. Neither recompiles when prompts come and go. A step reads the whole cache, so its length is that of the
longest row in it, rounded up to one of few: it is copied into a longer or a shorter one when that changes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxops
from models.decoder import Decoder
from models.decoder.cache import resized
from models.generate.inference import for_inference
from models.generate.sampling import Sampling, pick

SHORTEST_PIECE = 64  # pieces are 64, 128, 256, ... tokens
CACHE_MULTIPLE = 128  # tokens of the cache
GREEDY = Sampling()
Watch = Callable[[int, int], bool]


class Completion(NamedTuple):
    """What was drawn after a prompt.

    Attributes:
      tokens: without the token that ended it.
      ended: "end" by an end token, "watch" by `watch`, "length" when all tokens were drawn.
    """

    tokens: list[int]
    ended: Literal["end", "watch", "length"]


@dataclasses.dataclass(frozen=True)
class Batching:
    """How much is computed at once. No result depends on it.

    Attributes:
      slots: rows that are decoded together. Each takes a cache as long as the longest row.
      piece: tokens of prompts that are computed together, at the most; pieces of several prompts if they are short.
      steps: tokens that are drawn between two looks of the host.
      bucket: the shortest cache. The others are multiples of it, from four times that on with two lengths an octave;
        each one's programs are compiled once.
    """

    slots: int = 8
    piece: int = 512
    steps: int = 16
    bucket: int = 512

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more.")


DEFAULT = Batching()


class Rows(NamedTuple):
    """The state of all rows, on the device; each program overwrites it."""

    cache: Any  # as of `Decoder.empty_cache`
    token: jax.Array  # [S] int32, the last one drawn
    at: jax.Array  # [S] int32, its position, which is not in the cache yet
    left: jax.Array  # [S] int32, tokens to draw; 0 for a row that rests
    keys: jax.Array  # [S], of each row's draws


class Fixed(NamedTuple):
    """What a program is compiled for. ends: the tokens that end a row."""

    graphdef: nnx.GraphDef
    sampling: Sampling
    ends: tuple[int, ...]


def empty_rows(model: Decoder, slots: int, length: int) -> Rows:
    token, at, left = (jnp.zeros(slots, jnp.int32) for _ in range(3))
    return Rows(model.empty_cache(slots, length), token, at, left, jax.random.split(jax.random.key(0), slots))


def _is_end(token: jax.Array, ends: tuple[int, ...]) -> jax.Array:
    return jnp.isin(token, jnp.asarray(ends, jnp.int32))


def _draw(logits: jax.Array, keys: jax.Array, at: jax.Array, sampling: Sampling) -> jax.Array:
    """By key and position alone, so that no draw depends on a row's neighbours."""
    return pick(logits, jax.vmap(jax.random.fold_in)(keys, at), sampling)


@functools.partial(jax.jit, static_argnames="fixed", donate_argnames="rows")
def _prefill(fixed: Fixed, params: nnx.State, rows: Rows, pieces: jax.Array, where: jax.Array, key: jax.Array) -> Rows:
    """Pieces of prompts, [R, P], into their rows.

    Args:
      where: [R, 6] int32, of each: its row's slot, its prompt's number, the position of its first token, its tokens
        without padding, the prompt's tokens, and how many are to be drawn after it. A slot that does not exist stands
        for no piece.
    """
    slots, numbers, at, count, whole, length = where.T
    model = nnx.merge(fixed.graphdef, params)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)

    def own(x: jax.Array) -> jax.Array:
        first = (at == 0).reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(first, 0, x.at[slots].get(mode="clip"))  # 0 times a NaN of the row before would be NaN

    put = lambda x, new: x.at[slots].set(new, mode="drop")
    logits, cache = model.extend(pieces, jax.tree.map(own, rows.cache), at, count, whole)
    token = _draw(logits, keys, at + count, fixed.sampling)
    left = jnp.where(_is_end(token, fixed.ends), 0, length - 1)
    return Rows(
        jax.tree.map(put, rows.cache, cache),
        put(rows.token, token),
        put(rows.at, at + count),
        put(rows.left, jnp.maximum(left, 0)),
        put(rows.keys, keys),
    )


class Drawn(NamedTuple):
    """What `advance` did."""

    first: jax.Array  # [S], each row's last token of before
    tokens: jax.Array  # [steps, S], those drawn after it
    made: jax.Array  # [S], how many of them there are
    left: jax.Array  # [S], as of `Rows`


@functools.partial(jax.jit, static_argnames=("fixed", "steps"), donate_argnames="rows")
def advance(fixed: Fixed, params: nnx.State, rows: Rows, stop: jax.Array, steps: int) -> tuple[Rows, Drawn]:
    """Up to `steps` more tokens of each row that has some left, after those of `stop` [S] are stopped."""
    model = nnx.merge(fixed.graphdef, params)
    rows = rows._replace(left=jnp.where(stop, 0, rows.left))

    def goes_on(carry: tuple[jax.Array, Rows, jax.Array]) -> jax.Array:
        done, rows, _ = carry
        return (done < steps) & jnp.any(rows.left > 0)

    def step(carry: tuple[jax.Array, Rows, jax.Array]) -> tuple[jax.Array, Rows, jax.Array]:
        done, rows, tokens = carry
        # The loop ends when no row is active, so a single row is active in each step. As a constant this spares XLA the
        # choice between the cache's new and old values, a kernel a layer.
        active = rows.left > 0 if rows.left.size > 1 else jnp.ones_like(rows.left, bool)
        logits, cache = model.extend(rows.token[:, None], rows.cache, rows.at, active.astype(jnp.int32))
        at = rows.at + active
        token = jnp.where(active, _draw(logits, rows.keys, at, fixed.sampling), rows.token)
        left = jnp.where(active & ~_is_end(token, fixed.ends), rows.left - 1, 0)
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, done, 0)
        return done + 1, Rows(cache, token, at, left, rows.keys), tokens

    empty = jnp.zeros((steps, rows.token.shape[0]), jnp.int32)
    _, after, tokens = jax.lax.while_loop(goes_on, step, (jnp.int32(0), rows, empty))
    return after, Drawn(rows.token, tokens, after.at - rows.at, after.left)


def prefills(
    prompts: dict[int, tuple[int, Sequence[int]]], length: int, batching: Batching
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pieces and `where` of each call of `_prefill`, [R, P] and [R, 6], for prompts by slot: numbers and tokens.

    R is 1, or as many as `piece` and `slots` allow: two programs for each P.
    """
    pieces = []  # (which of its prompt, tokens with padding, slot, first token, tokens)
    for slot, (_, tokens) in prompts.items():
        for turn, at in enumerate(range(0, len(tokens), batching.piece)):
            count = min(batching.piece, len(tokens) - at)
            padded = min(batching.piece, jaxops.bucket_length(count, multiple=SHORTEST_PIECE, steps=1))
            pieces.append((turn, padded, slot, at, count))
    for (_, padded), alike in itertools.groupby(sorted(pieces), lambda piece: piece[:2]):
        alike, most = list(alike), min(batching.slots, max(1, batching.piece // padded))
        for some in (alike[i : i + most] for i in range(0, len(alike), most)):
            given = np.zeros((most if len(some) > 1 else 1, padded), np.int32)
            where = np.full((len(given), 6), [batching.slots, 0, 0, 0, 0, 0], np.int32)
            for row, (_, _, slot, at, count) in enumerate(some):
                number, tokens = prompts[slot]
                given[row, :count] = tokens[at : at + count]
                where[row] = slot, number, at, count, len(tokens), length
            yield given, where


def check_prompts(prompts: Sequence[Sequence[int]], vocab: int) -> None:
    """Checks whether there are no empty prompts, and no tokens that the model does not have."""
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {number} has no tokens: write one at least.")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < vocab:
                raise ValueError(f"prompt {number} has the token {token:,}, and the model's are 0 to {vocab - 1:,}.")


def cache_length(prompts: Sequence[Sequence[int]], length: int) -> int:
    """Tokens of the longest cache."""
    return jaxops.bucket_length(max(map(len, prompts)) + length, multiple=CACHE_MULTIPLE)


def next_length(needed: int, held: int, most: int, bucket: int) -> int:
    """Tokens of the next cache, after one of `held`, if so many are needed: a shorter one only of half the length."""
    wanted = min(most, jaxops.bucket_length(needed, multiple=bucket, steps=2))
    return wanted if wanted > held or 2 * wanted <= held else held


@dataclasses.dataclass
class _Row:
    """A row that is in use: the number of its prompt, and what was drawn."""

    number: int
    at: int  # tokens of it that are in the cache
    most: int  # and that will be there at the most
    tokens: list[int] = dataclasses.field(default_factory=list)
    is_new: bool = True

    def take(self, slot: int, drawn: Drawn, ends: tuple[int, ...], watch: Watch) -> Completion | None:
        """Adds its new tokens. Its completion, if it has ended."""
        new = [int(drawn.first[slot])] if self.is_new else []
        self.is_new = False
        self.at += int(drawn.made[slot])
        for token in new + drawn.tokens[: drawn.made[slot], slot].tolist():
            if token in ends:
                return Completion(self.tokens, "end")
            self.tokens.append(token)
            if watch(self.number, token):
                return Completion(self.tokens, "watch")
        return Completion(self.tokens, "length") if drawn.left[slot] == 0 else None


def completions(
    model: Decoder, prompts: Sequence[Sequence[int]], length: int, *, sampling: Sampling = GREEDY,
    key: jax.Array | None = None, ends: Sequence[int] = (), batching: Batching = DEFAULT,
    watch: Watch = lambda number, token: False,
) -> Iterator[tuple[int, Completion]]:  # fmt: skip
    """(number, completion) of each prompt, as they end, with up to `length` tokens drawn after each.

    Each prompt's result depends on the model, the prompt, its number, key and sampling only. Float sums may be rounded
    differently with other batching, and so decide between nearly equal logits.

    Args:
      model: a decoder, best one of `models.generate.inference.for_inference`: another one is made into one, each time.
      key: for draws; by default that of seed 0.
      ends: tokens that end a completion.
      watch: called with a prompt's number and its next token, if that is no end token; true ends the completion there.

    Raises:
      ValueError: an empty prompt, a token that the model does not have, or a length below 1.
    """
    check_prompts(prompts, model.config.vocab)
    if length < 1:
        raise ValueError(f"length is {length}; it must be 1 or more.")
    if not prompts:
        return
    graphdef, params = nnx.split(for_inference(model))
    fixed, key = Fixed(graphdef, sampling, tuple(ends)), jax.random.key(0) if key is None else key
    slots, most, held = min(batching.slots, len(prompts)), cache_length(prompts, length), 0
    batching = dataclasses.replace(batching, slots=slots)
    # Where the parameters are, as the programs' results will be: otherwise the first call is a program of its own.
    place = getattr(jax.tree.leaves(params)[0], "sharding", None)
    rows, active = jax.device_put(empty_rows(model, slots, held), place), dict[int, _Row]()
    waiting = iter(range(len(prompts)))
    while True:
        new = dict(zip([slot for slot in range(slots) if slot not in active], waiting, strict=False))
        active |= {slot: _Row(n, len(prompts[n]), len(prompts[n]) + length) for slot, n in new.items()}
        if not active:
            return
        needed = max(min(row.at + batching.steps, row.most) for row in active.values())
        if held != (held := next_length(needed, held, most, batching.bucket)):
            rows = rows._replace(cache=resized(rows.cache, held))
        for given, where in prefills({slot: (n, prompts[n]) for slot, n in new.items()}, length, batching):
            rows = _prefill(fixed, params, rows, given, where, key)
        stop = np.array([slot not in active for slot in range(slots)])
        rows, drawn = advance(fixed, params, rows, stop, batching.steps)
        drawn = jax.device_get(drawn)
        for slot, row in list(active.items()):
            if completion := row.take(slot, drawn, fixed.ends, watch):
                del active[slot]
                yield row.number, completion


def lowered(
    model: Decoder, prompt: Sequence[int], length: int, *, sampling: Sampling, key: jax.Array
) -> Iterator[jax.stages.Lowered]:
    """The programs that `generate(model, [prompt], length)` begins with, for a model of `jax.ShapeDtypeStruct`s."""
    state = nnx.state(model)
    device = jax.tree.leaves(state)[0].sharding
    placed = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: for_inference(model)))
    fixed, params, batching = Fixed(graphdef, sampling, ()), placed(params), dataclasses.replace(DEFAULT, slots=1)
    most = cache_length([prompt], length)
    held = next_length(len(prompt) + min(batching.steps, length), 0, most, batching.bucket)
    rows = placed(jax.eval_shape(lambda: empty_rows(model, 1, held)))
    for given, where in prefills({0: (0, prompt)}, length, batching):
        yield _prefill.lower(fixed, params, rows, given, where, key)
    yield advance.lower(fixed, params, rows, np.zeros(1, bool), batching.steps)


def generate(model: Decoder, prompts: Sequence[Sequence[int]], length: int, **options: Any) -> list[Completion]:
    """All `completions`, in the prompts' order; the options are theirs."""
    found = dict(completions(model, prompts, length, **options))
    return [found[number] for number in range(len(prompts))]
