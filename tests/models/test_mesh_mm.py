"""Training the model of text and images over a mesh is training it on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from models.distributed.mesh import AXES, make_mesh, of_own_batch, parts_of, replicate, shard_batch, shard_state
from models.multimodal.experts import ModalityExperts
from models.multimodal.interleaved import Batch, Room, Tokens, captioned, illustrated, lay_out, stack
from models.multimodal.loss import losses_of
from models.multimodal.model import Multimodal, MultimodalConfig
from models.training import loop
from models.training import mm as train_mm
from models.training.presets import MultimodalPreset
from tests.arrays import drawn_like, put
from tests.compare import assert_close
from tests.devices import needs_four
from tests.models.test_interleaved import image_of, text_of
from tests.models.test_mesh import Outcome, assert_same, copied, fraction, matrices, split_part

pytestmark = needs_four
MODEL = MultimodalConfig(
    vocab=36,
    patch_values=4,
    width=16,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=6,
    text_experts=4,
    text_hidden=10,
    image_experts=8,
    image_hidden=14,
    top_k=2,
    qk_norm=True,
    tie_embeddings=True,
    backend="xla",
    unroll=True,
)
# Several parts' balancing losses have no mean that is the whole batch's: they are compared elsewhere.
PRESET = MultimodalPreset(
    model=MODEL,
    rows=28,
    predictions=16,
    documents=3,
    steps=8,
    learning_rate=1e-2,
    warmup_steps=1,
    eval_every=8,
    balance_weight=0.0,
    image_weight=2.0,
    reading_noise=0.2,
)
TOKENS, ROOM, PARTS = Tokens(33, 34, 0), Room(28, 16, 3, patch=2, channels=1), 4


def batch_of(step: int, parts: int) -> Batch:
    """[parts, ...]. Of two devices that share a part both have rows of an even one's image; one has no odd one's."""
    found = []
    for part in range(parts):
        drawn = illustrated(text_of(8, 9, 10 + part), image_of(2, 3, seed=step + part), TOKENS)
        read = captioned(text_of(5, 6), image_of(3, 3 + step % 2, seed=9 * step), TOKENS)
        found.append(lay_out([drawn] if part % 2 else [drawn, read], ROOM))
    return stack(found)


def random_params(config: MultimodalConfig) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """In a new model an image's block is the identity, and velocities are zero."""
    graphdef, params, others = nnx.split(nnx.eval_shape(lambda: Multimodal(config, rngs=nnx.Rngs(0))), nnx.Param, ...)
    rng = np.random.default_rng(0)
    drawn = jax.tree.map_with_path(
        lambda path, p: put(rng.normal(size=p.shape) / 4 + ("scale" in jax.tree_util.keystr(path)), p.dtype),
        params,
    )
    return graphdef, drawn, jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), others)


def in_turn(model: Multimodal, batch: Batch, key: jax.Array) -> tuple[jax.Array, loop.Measured]:
    """The objective on one device, of all parts' batches [parts, ...], each with its own draws."""
    graphdef, state = nnx.split(model)
    how = {"time_shift": PRESET.time_shift, "reading_noise": PRESET.reading_noise}

    def of_part(given: tuple[Batch, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        part, number = given
        losses, routed = losses_of(nnx.merge(graphdef, state), part, jax.random.fold_in(key, number), **how)
        sums = losses.text + PRESET.image_weight * losses.image, losses.predictions + losses.patches
        return *sums, routed.load

    sums, rows, loads = jax.lax.map(of_part, (batch, jnp.arange(PARTS)))
    loss = jnp.sum(sums) / jnp.sum(rows)
    return loss, loop.Measured(loss, jnp.zeros(()), train_mm.shares(PRESET, jnp.sum(loads, axis=0)))


@functools.cache
def alone():
    """The compiled step on one device."""
    return loop.make_step(random_params(MODEL)[0], PRESET, in_turn)


def train(shape: str | None, parts: int) -> Outcome:
    """On one device the batches have empty parts, too, so that one program is for all numbers of parts."""
    mesh = None if shape is None else make_mesh(shape)
    state = shard_state(loop.init_state(PRESET, random_params(MODEL)[1], nnx.State({})), mesh)
    key = replicate(jax.random.key(0), mesh)
    step = alone() if mesh is None else train_mm.make_step(train_mm.sharded_graphdef(PRESET, mesh), PRESET, mesh)
    empty = [] if mesh is not None else (PARTS - parts) * [lay_out([], ROOM)]
    read, first, text = [], None, ""
    for number in range(3):
        batch = batch_of(number, parts)
        whole = jax.tree.map(lambda x, *more: np.stack([*x, *more])[None], batch, *empty)
        placed = loop.place(whole, mesh)
        if mesh is not None and first is None:
            step = step.lower(state, placed, key).compile()
            text = step.as_text()
        state, metrics = step(state, placed, key)
        first = copied(state) if first is None else first
        read.append(metrics._replace(balance=None, fill=None))
    return Outcome(first, read, jnp.zeros(()), text)


def test_as_on_one_device():
    """Over the axis `expert`: the next test."""
    shape = "fsdp=2,tensor=2"
    mesh = make_mesh(shape)
    got = train(shape, parts_of(mesh))
    assert_same(got, train(None, parts_of(mesh)))
    params = got.first.params
    sides = [params["blocks"]["moe"][name] for name in ("text", "image")]
    assert {fraction(side[name][...]) for side in sides for name in ("gate", "up", "down")} == {1 / 4}
    assert {fraction(x) for x in matrices([params["blocks"]["attention"], params["embed"]])} == {1 / 4}


def test_experts_count_all_rows_once():
    """Over expert=2,tensor=2, with rows of both kinds and of none on each device: results, loss, load, gradients."""
    rng = np.random.default_rng(0)
    (alone, params), (sharded, _) = (
        nnx.split(nnx.eval_shape(lambda of=of: ModalityExperts(MODEL, sharded=of, rngs=nnx.Rngs(0))))
        for of in (False, True)
    )
    params = drawn_like(params, rng, 0.3)
    x = put(rng.normal(size=(24, MODEL.width)), jnp.float32)
    rows = x, put(rng.random(24) < 0.6), put(rng.random(24) < 0.8)
    mesh = make_mesh("expert=2,tensor=2")
    specs, whole = split_part("moe", params, mesh)

    def run(graph, params, *rows):
        y, counts = nnx.merge(graph, params)(*rows)
        return y, counts.routed(MODEL, sharded=graph is sharded)

    over = jax.shard_map(
        lambda params, *rows: run(sharded, whole(params), *rows),
        mesh=mesh,
        in_specs=(specs, *[P(AXES)] * 3),
        out_specs=(P(AXES), P()),
    )

    def value(layer, params, *rows):
        y, routed = layer(params, *rows)
        return jnp.sum(jnp.sin(y)) + routed.aux_loss, (y, routed)

    (_, (got, routed)), grads = jax.jit(jax.value_and_grad(functools.partial(value, over), has_aux=True))(params, *rows)
    one = functools.partial(run, alone)
    (_, (want, wanted)), others = jax.jit(jax.value_and_grad(functools.partial(value, one), has_aux=True))(
        params, *rows
    )
    assert_close(got, want, "float32")
    np.testing.assert_array_equal(routed.load, wanted.load)
    np.testing.assert_allclose(routed.aux_loss, wanted.aux_loss, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        assert_close(ours, theirs, "float32", scale=4)


def test_fp8():
    """Over tensor=4, in a loop over blocks, with untied logits. All scales start at one: the largest numbers are equal,
    up to values at the edge of two numbers of eight bits.
    """
    mesh = make_mesh("tensor=4")
    config = dataclasses.replace(MODEL, unroll=False, kv_heads=4, tie_embeddings=False, recipe="delayed")
    preset = dataclasses.replace(PRESET, model=config, balance_weight=0.1)
    graphdef, params, histories = random_params(config)
    batch, objective = batch_of(0, 1), functools.partial(train_mm.objective, preset)
    first = lambda model, batch, key: objective(model, batch, jax.random.fold_in(key, 0))
    alone = loop.make_value(graphdef, first, None, training=True)
    over = loop.make_value(train_mm.sharded_graphdef(preset, mesh), of_own_batch(objective, mesh), mesh, training=True)
    key = jax.random.key(0)
    want, (_, wanted) = jax.jit(alone)(params, histories, jax.tree.map(lambda x: x[0], batch), key)
    given = shard_state(params, mesh), shard_state(histories, mesh), shard_batch(batch, mesh)
    got, (_, found) = jax.jit(over)(*given, replicate(key, mesh))
    np.testing.assert_allclose(got, want, rtol=2e-3)
    assert len(jax.tree.leaves(found)) == 4
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(ours[..., 1, :], theirs[..., 1, :])
        np.testing.assert_allclose(ours[..., 0, :], theirs[..., 0, :], rtol=0.05)


def test_what_tensor_does_not_divide():
    mesh, pixels = make_mesh("data=2,tensor=2"), image_of(2, 2)
    pairs = [(pixels, [text_of(1, 2)])] * 5
    material = train_mm.Material(pairs, pairs, None, TOKENS, ROOM._replace(rows=56, predictions=32, documents=6))
    train_mm.check_fits(PRESET, material, mesh)
    assert train_mm.heldout_batches(PRESET, material, mesh).tokens.shape == (2, 2, 28)
    for wrong, error in (
        ({"kv_heads": 1}, "tensor=2 does not divide kv_heads, 1"),
        ({"vocab": 37}, "tensor=2 does not divide the vocabulary, 37: write a model.vocab .* such as 38"),
    ):
        with pytest.raises(ValueError, match=error):
            train_mm.check_fits(dataclasses.replace(PRESET, model=dataclasses.replace(MODEL, **wrong)), material, mesh)
    for name, size in (("rows", 54), ("predictions", 34)):
        wrong = material._replace(room=material.room._replace(**{name: size}))
        error = f"^{name} is {size}; with 2 micro-batches and devices, each over tensor=2, write multiples of 4"
        with pytest.raises(ValueError, match=error):
            train_mm.check_fits(PRESET, wrong, mesh)
