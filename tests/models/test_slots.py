"""A continuous batch: the same tokens whatever else is in it, no recompilation, no copies of weights and caches."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoder import DecoderConfig
from models.generate import slots
from models.generate.inference import for_inference
from models.generate.sampling import Sampling
from models.generate.slots import Batching, Completion, generate
from tests.models.test_decoder_parts import model_of

CONFIG = DecoderConfig(  # of one layer: for inference layers are unrolled; the checkpoints have more
    vocab=61, width=24, layers=1, heads=6, kv_heads=2, head_dim=6, hidden=20, experts=5, top_k=2, qk_norm=True
)
PROMPTS = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in (3, 1, 17, 70, 2, 9, 131)]
LENGTH = 11
BATCHINGS = [
    Batching(slots=2, piece=7, steps=4),
    Batching(slots=5, piece=64, steps=3),
    Batching(slots=4, piece=256, steps=5, bucket=32),
]


@pytest.fixture(scope="module")
def stacked():
    """As it is trained, which no test changes."""
    return model_of(CONFIG)


@pytest.fixture(scope="module")
def model(stacked):
    return for_inference(stacked)


@pytest.fixture(scope="module")
def alone(stacked):
    """Each prompt by itself, by passes over the whole row: the likeliest tokens."""
    forward = nnx.jit(lambda model, tokens, last: jnp.argmax(model(tokens)[0][0, last]))
    found = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(LENGTH):
            tokens = np.zeros((1, 160), np.int32)
            tokens[0, : len(row)] = row
            row.append(int(forward(stacked, tokens, len(row) - 1)))
        found.append(row[len(prompt) :])
    return found


@pytest.mark.parametrize("batching", BATCHINGS[::2])  # the other one draws
def test_greedy_tokens_do_not_depend_on_the_batch(model, alone, batching):
    got = generate(model, PROMPTS, LENGTH, batching=batching)
    assert got == [Completion(tokens, "length") for tokens in alone]


def test_rows_end_at_any_time_and_the_next_prompt_takes_their_place(model, alone):
    """By end tokens, which are left out, and by what `watch` says."""
    ends = {tokens[4] for tokens in alone[:3]}
    cut = [next((i for i, token in enumerate(tokens) if token in ends), LENGTH) for tokens in alone]
    assert 0 < len(set(cut)) < LENGTH > min(cut)
    wanted = [Completion(t[:n], "length" if n == LENGTH else "end") for t, n in zip(alone, cut, strict=True)]
    for order in (range(7), (6, 3, 0, 5, 1, 4, 2)):
        got = generate(model, [PROMPTS[n] for n in order], LENGTH, ends=tuple(ends), batching=BATCHINGS[0])
        assert got == [wanted[n] for n in order]
    seen = {number: [] for number in range(7)}
    watch = lambda number, token: seen[number].append(token) or len(seen[number]) == number + 1
    got = generate(model, PROMPTS, LENGTH, batching=BATCHINGS[0], watch=watch)
    assert got == [Completion(tokens[: number + 1], "watch") for number, tokens in enumerate(alone)]
    assert list(seen.values()) == [completion.tokens for completion in got]


def test_draws_depend_on_key_prompt_and_number_alone(model):
    draw = lambda seed, prompts, batching: generate(
        model, prompts, LENGTH, sampling=Sampling(1.0, 20, 0.9), key=jax.random.key(seed), batching=batching
    )
    drawn = draw(0, PROMPTS[:4], BATCHINGS[0])
    assert drawn == draw(0, PROMPTS[:4], BATCHINGS[1])
    other = draw(1, PROMPTS[:4], BATCHINGS[0])
    assert all(one != another for one, another in zip(drawn, other, strict=True))
    same = draw(0, [PROMPTS[3]] * 3, BATCHINGS[0])
    assert len({tuple(completion.tokens) for completion in same}) == 3


@pytest.mark.parametrize("batching", BATCHINGS[:1])
def test_a_row_of_nans_spoils_no_other(model, alone, batching):
    """Neither its neighbour nor the next prompt in its slot, whose cache held them."""
    graphdef, state = nnx.split(model)
    spoiled, others = nnx.merge(graphdef, jax.tree.map(jnp.copy, state)), (0, 2, 6)
    spoils = next(token for token in range(61) if all(token not in PROMPTS[n] + alone[n] for n in others))
    spoiled.embed.embedding[...] = spoiled.embed.embedding[...].at[spoils].set(jnp.nan)
    got = generate(spoiled, [[spoils, 3] * 20, *(PROMPTS[n] for n in others)], LENGTH, batching=batching)
    assert [completion.tokens for completion in got[1:]] == [alone[n] for n in others]


def test_a_cache_is_as_long_as_its_longest_row(model, alone, monkeypatch):
    """Rounded up, and shorter again behind it; never so short that a token is not written. Of a single row."""
    lengths, needed, advance = [], [], slots.advance

    def watched(fixed, params, rows, stop, steps):
        lengths.append(rows.cache[0][0].shape[2])
        rows, drawn = advance(fixed, params, rows, stop, steps)
        needed.append(int(jnp.max(jnp.where(stop, 0, rows.at))))
        return rows, drawn

    monkeypatch.setattr(slots, "advance", watched)
    batching = Batching(slots=1, piece=128, steps=5, bucket=16)
    got = generate(model, [PROMPTS[n] for n in (1, 3, 4)], 20, batching=batching)
    assert [completion.tokens[:LENGTH] for completion in got] == [alone[n] for n in (1, 3, 4)]
    assert max(needed) == 70 + 20 - 1
    assert all(need <= length for need, length in zip(needed, lengths, strict=True))
    assert [length for length, _ in itertools.groupby(lengths)] == [16, 32, 96, 16, 32]
    assert slots.next_length(100, 0, 120, 64) == 120
    assert [slots.next_length(n, 256, 4096, 64) for n in (10, 120, 129, 256, 257, 300)] == [64, 128, 256, 256, 384, 384]


def test_nothing_recompiles(model):
    compiled = lambda: (slots._prefill._cache_size(), slots.advance._cache_size())
    for number, lengths in enumerate(([5, 9], [1, 2, 64], [5, 60, 100, 3, 63], [9, 9, 9, 9])):
        generate(model, [[1] * n for n in lengths], 5, batching=BATCHINGS[0])
        if number == 0:
            before = compiled()
    assert compiled() == before


def test_weights_are_read_and_caches_written_where_they_are(model):
    """In the compiled program nothing of the size of a layer's cache or of a weight is copied, and both are donated."""
    config = dataclasses.replace(CONFIG, experts=0, top_k=0, width=40, vocab=300)
    dense = for_inference(model_of(config))
    graphdef, params = nnx.split(dense)
    rows = slots.empty_rows(dense, 3, 128)
    given = slots.Fixed(graphdef, Sampling(), (3,)), params, rows, np.zeros(3, bool), 4
    text = slots.advance.lower(*given).compile().as_text()
    moved = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|slice|dynamic-slice|transpose|convert)\(", text)
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in moved]
    assert len(sizes) > 0
    assert max(sizes) < min(x.size for x in jax.tree.leaves(rows.cache))
    assert not {*sizes} & {x.size for x in jax.tree.leaves(params) if x.ndim > 1}
    aliases = text.split("input_output_alias={", 1)[1].splitlines()[0]
    assert aliases.count("-alias)") >= len(jax.tree.leaves(rows.cache))


def test_inference_computes_the_same_bits():
    """In bfloat16, with parameters that are cast before and not at each use; the stack's arrays are freed."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    stacked = nnx.clone(model_of(config))
    extend = nnx.jit(
        lambda model: model.extend(jnp.array([[1, 2, 3]]), model.empty_cache(1, 8), jnp.zeros(1, int), jnp.array([3]))
    )
    wanted, _ = extend(stacked)
    leaves = jax.tree.leaves(nnx.state(stacked))
    model = for_inference(stacked, consume=True)
    np.testing.assert_array_equal(extend(model)[0], wanted)
    assert for_inference(model) is model
    assert all(leaf.is_deleted() for leaf in leaves if leaf.size > config.width * config.layers)
    dtypes = {jax.tree_util.keystr(path): x.dtype for path, x in jax.tree.leaves_with_path(nnx.state(model))}
    assert {str(dtype) for name, dtype in dtypes.items() if "router" in name or "scale" in name} == {"float32"}
    assert {str(dtype) for name, dtype in dtypes.items() if "kernel" in name and "router" not in name} == {"bfloat16"}


def test_what_is_wrong(model):
    assert generate(model, [], 3) == []
    for prompts, says in (
        ([[1], []], "prompt 1 has no tokens"),
        ([[61]], "the token 61, .* 0 to 60"),
        ([[-1]], "token -1"),
    ):
        with pytest.raises(ValueError, match=says):
            generate(model, prompts, 3)
    with pytest.raises(ValueError, match="length is 0"):
        generate(model, [[1]], 0)
    for name in ("slots", "piece", "steps", "bucket"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            Batching(**{name: 0})
