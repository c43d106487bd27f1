"""Training with the mesh axis `tensor`, alone and beside the others, is training on one device."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxops
from models.data.images import Batch
from models.decoder import DecoderConfig, Experts
from models.decoder import loss as decoder_loss
from models.distributed.mesh import AXES, make_mesh, of_own_batch, parts_of, replicate, shard_batch, shard_state
from models.dit.model import DiT, DiTConfig, loss_fn
from models.training import dit as train_dit
from models.training import lm as train_lm
from models.training import loop
from models.training.presets import DiTPreset
from tests.arrays import drawn_like, put
from tests.compare import assert_close
from tests.devices import needs_four
from tests.models.test_decoder_parts import model_of
from tests.models.test_mesh import (
    Outcome,
    assert_same,
    batches_of,
    copied,
    fraction,
    matrices,
    preset_of,
    split_part,
    train,
)

pytestmark = needs_four
MIXED = DecoderConfig(
    256, 16, 2, 8, 4, 4, 24, experts=4, top_k=2, dense_layers=(0,), dense_hidden=20, tie_embeddings=True, backend="xla"
)
UNTIED = dataclasses.replace(
    MIXED, tie_embeddings=False, qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True, sinks=True
)
DIT = DiTPreset(
    layers=1, width=16, heads=4, tokens=12, images=3, steps=8, learning_rate=1e-2, warmup_steps=1, eval_every=8
)


def test_a_decoder_as_on_one_device():
    """Attention with sinks, dense blocks with biases; untied logits.

    Experts, beside fsdp and expert, and with tied logits: test_mesh_parts.py. Beside data, and evaluated:
    test_launch.py.
    """
    config = dataclasses.replace(UNTIED, experts=0, top_k=0, dense_layers=(), dense_hidden=None)
    got = train(config, "tensor=4", evaluates=False)
    assert_same(got, train(config, evaluates=False))
    assert {fraction(x) for x in matrices(got.first.params)} == {1 / 4}
    assert "f32[64,64]" in got.program, "logits of a device's words"
    assert not re.search(r"f32\[(\d+,)+256\]", got.program), "no device has all words'"


def test_experts_count_all_tokens_once():
    """Over expert=2,tensor=2, where each device counts the gathered tokens of all."""
    (alone, params), (sharded, _) = (
        nnx.split(nnx.eval_shape(lambda of=of: Experts(MIXED, sharded=of, rngs=nnx.Rngs(0)))) for of in (False, True)
    )
    params = drawn_like(params, np.random.default_rng(1), 0.3)
    x = put(np.random.default_rng(0).normal(size=(24, MIXED.width)), jnp.float32)
    mesh = make_mesh("expert=2,tensor=2")
    specs, whole = split_part("mlp", params, mesh)

    def layer(params, x):
        y, routed = nnx.merge(sharded, whole(params))(x)
        return y, jax.tree.map(lambda x: x[None], routed).summed()

    run = jax.shard_map(layer, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(P(AXES), P()))
    (got, routed), (want, wanted) = jax.jit(run)(params, x), nnx.merge(alone, params)(x)
    assert_close(got, want, "float32")
    np.testing.assert_array_equal(routed.load[0], wanted.load)
    losses = [(found.aux_loss, found.z_loss) for found in (jax.tree.map(lambda x: x[0], routed), wanted)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def sent(jaxpr: Any, name: str) -> list[tuple[Any, str]]:
    """Shape and dtype of what each collective of a name and of the axis `tensor` sends; of loops once."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == name and "tensor" in equation.params["axis_name"]:
            found += [(x.aval.shape, str(x.aval.dtype)) for x in equation.invars]
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            found += sent(inner, name) if hasattr(inner, "eqns") else []
    return found


def test_what_a_decoder_sends():
    """Of one block: all rows before attention and before the gated unit, in the compute dtype, never in float32."""
    preset = preset_of(dataclasses.replace(UNTIED, experts=0, top_k=0, dense_layers=(), dtype="bfloat16", sinks=False))
    mesh, batch = make_mesh("data=2,tensor=2"), batches_of(preset)(0)
    params = jax.eval_shape(lambda: train_lm.init_state(preset, 0)[1].params)
    value = loop.make_value(
        train_lm.sharded_graphdef(preset, mesh),
        functools.partial(train_lm.objective, preset, True),
        mesh,
        training=True,
    )
    given = (params, nnx.State({}), jax.tree.map(lambda x: x[0], batch), jax.random.key(0))
    own, all_rows = ((16, 16), "bfloat16"), ((32, 16), "bfloat16")
    forward = jax.make_jaxpr(value)(*given).jaxpr
    assert sent(forward, "all_gather") == [own] * 3, "a loop over blocks, and the logits"
    assert sent(forward, "reduce_scatter") == [all_rows] * 3, "the embeddings, and a loop over blocks"
    whole = jax.make_jaxpr(jax.grad(value, has_aux=True))(*given).jaxpr
    assert sent(whole, "all_gather") == [own] * 9
    assert sent(whole, "reduce_scatter") == [all_rows] * 6


def test_a_loss_in_pieces(monkeypatch):
    """Of words and rows on four devices: five rows each in two pieces."""
    monkeypatch.setattr(decoder_loss, "LOGITS", 24)
    rng = np.random.default_rng(0)
    x, kernel = (put(rng.normal(size=shape), jnp.float32) for shape in ((20, 4), (4, 8)))
    targets = put(rng.integers(0, 8, 20), jnp.int32)

    def part(x, kernel, targets):
        logits = lambda x: jaxops.all_gather_matmul(x, kernel, "tensor")
        return decoder_loss.cross_entropies(logits, 8, x, targets)

    specs = {"in_specs": (P("tensor"), P(None, "tensor"), P()), "out_specs": P()}
    found = jax.shard_map(part, mesh=make_mesh("tensor=4"), **specs)
    wanted = lambda x, kernel, targets: -jnp.take_along_axis(jax.nn.log_softmax(x @ kernel), targets[:, None], 1)[:, 0]
    ahead = put(rng.normal(size=20), jnp.float32)
    for got, want in zip(
        *(
            jax.jit(lambda *given, of=of: jax.vjp(lambda *w: of(*w, targets), *given)[1](ahead))(x, kernel)
            for of in (found, wanted)
        ),
        strict=True,
    ):
        assert_close(got, want, "float32")
    assert_close(jax.jit(found)(x, kernel, targets), wanted(x, kernel, targets), "float32")


def test_fp8_scales_are_of_all_devices():
    """Largest numbers of a whole kernel, of which each device has a part; and losses, the second with their scales."""
    config = dataclasses.replace(UNTIED, experts=0, top_k=0, dense_layers=(), layers=1, recipe="delayed", sinks=False)
    preset, (graphdef, *first) = preset_of(config), nnx.split(model_of(config), nnx.Param, ...)
    objective, found = functools.partial(train_lm.objective, preset, preset.pack), []
    for mesh in (make_mesh("data=2,tensor=2"), None):
        params, histories = first if mesh is None else shard_state(first, mesh)
        of = graphdef if mesh is None else train_lm.sharded_graphdef(preset, mesh)
        value, losses = jax.jit(loop.make_value(of, objective, mesh, training=True)), []
        for step in range(2):
            batch = jax.tree.map(lambda x: x[0], loop.place(batches_of(preset)(step), mesh))
            loss, (_, histories) = value(params, histories, batch, replicate(jax.random.key(0), mesh))
            losses.append(loss)
        found.append((losses, histories))
    (losses, histories), (wanted_losses, wanted_histories) = found
    for ours, wanted in zip(*map(jax.tree.leaves, (histories, wanted_histories)), strict=True):
        np.testing.assert_array_equal(ours[:, 1], wanted[:, 1])
        np.testing.assert_allclose(ours[:, 0], wanted[:, 0], rtol=0.05)
    assert len(jax.tree.leaves(histories)) == 7
    np.testing.assert_allclose(losses, wanted_losses, rtol=2e-3)


def drawn(sizes: DiTConfig) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """A new DiT gives zero, whatever it is given."""
    graphdef, params, histories = nnx.split(nnx.eval_shape(lambda: DiT(sizes, rngs=nnx.Rngs(0))), nnx.Param, ...)
    params = drawn_like(params, np.random.default_rng(0), 0.3)
    return graphdef, params, jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), histories)


def images(step: int, parts: int) -> Batch:
    """[1, parts, ...]: images that begin and end on different devices, one without tokens, and rows of none."""
    rng = np.random.default_rng(step)
    offsets = np.stack([[0, 4, 4, 10], [0, 6, 6, 8]])[:parts].astype(np.int32)
    grids = np.stack([[[2, 2], [1, 1], [2, 3]], [[3, 2], [1, 1], [1, 2]]])[:parts].astype(np.int32)
    labels = rng.integers(0, 3, (parts, 3)).astype(np.int32)
    return jax.tree.map(
        lambda x: x[None],
        Batch(rng.normal(size=(parts, 12, 4)).astype(np.float32), offsets, grids, labels),
    )


def in_turn(model: DiT, batch: Batch, key: jax.Array) -> tuple[jax.Array, loop.Measured]:
    """The objective on one device, of all parts' batches [parts, ...], each with its own draws."""
    parts = [jax.tree.map(lambda x, n=n: x[n], batch) for n in range(batch.labels.shape[0])]
    losses = [part.counted() * loss_fn(model, part, jax.random.fold_in(key, n)) for n, part in enumerate(parts)]
    loss = sum(losses[1:], losses[0]) / batch.counted()
    return loss, loop.Measured(loss)


@functools.cache
def train_images(parts: int, shape: str | None = None) -> Outcome:
    mesh, sizes = None if shape is None else make_mesh(shape), DiTConfig(1, 16, 4, 4, 3, 6, backend="xla")
    graphdef, params, none = drawn(sizes)
    state = shard_state(loop.init_state(DIT, params, none), mesh)
    key = replicate(jax.random.key(0), mesh)
    if mesh is None:
        step = loop.make_step(graphdef, DIT, in_turn)
    else:
        step = train_dit.make_step(train_dit.sharded_graphdef(sizes, mesh), DIT, mesh)
    batches = [loop.place(images(number, parts), mesh) for number in range(3)]
    step = step.lower(state, batches[0], key).compile()
    state, metrics = step(state, batches[0], key)
    first, read = copied(state), [metrics]
    for batch in batches[1:]:
        state, metrics = step(state, batch, key)
        read.append(metrics)
    return Outcome(first, read, jnp.zeros(()), step.as_text())


def test_a_dit_as_on_one_device():
    """Averaged weights, too. Over tensor=4: the next test."""
    mesh = make_mesh("fsdp=2,tensor=2")
    assert parts_of(mesh) == 2
    got = train_images(2, "fsdp=2,tensor=2")
    assert_same(got, train_images(2))
    split, fsdp = 1 / mesh.shape["tensor"] / mesh.shape["fsdp"], 1 / mesh.shape["fsdp"]
    assert {fraction(x) for x in matrices(got.first.params["blocks"])} == {split}
    assert {fraction(x) for x in matrices(got.first.params)} == {split, fsdp}


def test_a_dit_in_fp8():
    """Whose first scales are one: as on one device, up to values at the edge of two numbers of eight bits."""
    sizes, mesh = DiTConfig(1, 16, 4, 4, 3, 6, recipe="delayed", backend="xla"), make_mesh("tensor=4")
    (graphdef, params, histories), batch = drawn(sizes), jax.tree.map(lambda x: x[0], images(0, 1))
    alone = loop.make_value(graphdef, in_turn, None, training=True)
    own = of_own_batch(train_dit.objective, mesh)
    over = loop.make_value(train_dit.sharded_graphdef(sizes, mesh), own, mesh, training=True)
    want, (_, wanted) = jax.jit(alone)(params, histories, batch, jax.random.key(0))
    given = shard_state(params, mesh), shard_state(histories, mesh), shard_batch(batch, mesh)
    got, (_, found) = jax.jit(over)(*given, replicate(jax.random.key(0), mesh))
    np.testing.assert_allclose(got, want, rtol=1e-3)
    assert len(jax.tree.leaves(found)) == 4
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(ours[..., 1, :], theirs[..., 1, :])
        np.testing.assert_allclose(ours[..., 0, :], theirs[..., 0, :], rtol=0.05)
