"""Training over meshes of four devices is training on one: losses, gradients, histories; what is split really is."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxops.offload import Policy
from models.data import images, packing
from models.data.text import split
from models.decoder import DecoderConfig, Latent
from models.distributed.mesh import (
    AXES,
    Splits,
    collect,
    gather,
    make_mesh,
    name_of,
    of_own_batch,
    parts_of,
    replicate,
    shard_batch,
    shard_state,
    split_of,
)
from models.dit.model import DiTConfig
from models.multimodal.experts import ModalityExperts
from models.multimodal.interleaved import Room, Tokens, captioned, illustrated, lay_out
from models.multimodal.model import MultimodalConfig
from models.training import dit as train_dit
from models.training import lm as train_lm
from models.training import loop
from models.training import mm as train_mm
from models.training.presets import DIT_PRESETS, MultimodalPreset, Preset, rates
from tests.arrays import drawn_like, put
from tests.compare import assert_close
from tests.devices import needs_four
from tests.jaxprs import equations
from tests.models.test_decoder_parts import LATENT, MUCH, model_of
from tests.models.test_interleaved import image_of, text_of

pytestmark = needs_four
SIZES = {"vocab": 256, "width": 16, "head_dim": 8, "hidden": 12, "dense_hidden": 20}
SPARSE = DecoderConfig(256, 16, 2, 2, 2, 8, 24, experts=4, top_k=2, tie_embeddings=True, backend="xla")
DENSE = dataclasses.replace(SPARSE, experts=0, top_k=0, tie_embeddings=False)
UNTIED = DecoderConfig(
    256, 16, 2, 8, 4, 4, 24, qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True, sinks=True, backend="xla"
)
DECODERS = {
    "dense": dataclasses.replace(DENSE, policy=Policy()),
    "sparse": SPARSE,
    "much": dataclasses.replace(MUCH, **SIZES, layers=2, sliding=(0,), dense_layers=(1,)),
    "latent": dataclasses.replace(LATENT, **SIZES, layers=3, latent=Latent(4, 6, 4)),
    "untied": UNTIED,
    "fp8": dataclasses.replace(UNTIED, layers=1, recipe="delayed", sinks=False),
}
LENGTHS = np.random.default_rng(1).integers(2, 30, 40)
TEXT = np.random.default_rng(0).integers(0, 256, LENGTHS.sum(), dtype=np.uint8)
CORPUS = split(packing.Documents(TEXT, np.cumsum([0, *LENGTHS])))
MM = MultimodalConfig(
    vocab=36, patch_values=4, width=16, layers=1, heads=4, kv_heads=2, head_dim=6, text_experts=4, text_hidden=10,
    image_experts=8, image_hidden=14, top_k=2, qk_norm=True, tie_embeddings=True, backend="xla", unroll=True,
)  # fmt: skip
# Several parts' balancing losses have no mean that is the whole batch's: they are compared with one part, and below.
MM_PRESET = MultimodalPreset(
    model=MM, rows=28, predictions=16, documents=3, balance_weight=0.0, image_weight=2.0, reading_noise=0.2,
    **rates(8, 1e-2, 1, 8),
)  # fmt: skip
MM_FP8 = dataclasses.replace(MM, unroll=False, kv_heads=4, tie_embeddings=False, recipe="delayed")
DIT, DIT_FP8 = DiTConfig(1, 16, 4, 4, 3, 6, backend="xla"), DiTConfig(1, 16, 4, 4, 3, 6, recipe="delayed")
PACKED = {
    "dit": train_dit.DitTask(DIT_PRESETS["demo"], DIT),
    "dit fp8": train_dit.DitTask(DIT_PRESETS["demo"], DIT_FP8),
    "mm": train_mm.MmTask(MM_PRESET),
    "mm fp8": train_mm.MmTask(dataclasses.replace(MM_PRESET, model=MM_FP8, balance_weight=0.1)),
}
TOKENS, ROOM = Tokens(33, 34, 0), Room(28, 16, 3, patch=2, channels=1)


def preset_of(config: DecoderConfig) -> Preset:
    """With a document a row: the devices count different numbers of tokens."""
    return Preset(config, 8, 8, pack=False, buckets=1, balance_weight=0.1, **rates(8, 1e-2, 1, 8))


def batches_of(preset: Preset) -> Callable[[int], packing.Batch]:
    return train_lm.make_batches(preset, CORPUS.train, train_lm.make_rows(preset, CORPUS.train))


class Problem(NamedTuple):
    """A model's loss as a function of (parameters, histories, batch, key), and all but the histories of a batch."""

    value: Callable
    params: nnx.State
    histories: nnx.State
    batches: Callable[[int], Any]


def decoder_problem(name: str, mesh: Any) -> Problem:
    task = train_lm.LmTask(preset_of(DECODERS[name]))
    plain = dataclasses.replace(task.preset.model, policy=None)
    graphdef, params, histories = nnx.split(model_of(plain), nnx.Param, ...)
    if mesh is not None:
        graphdef = task.sharded_graphdef(mesh)
    batches = lambda step: jax.tree.map(lambda x: x[0], loop.place(batches_of(task.preset)(step), mesh))
    return Problem(loop.make_value(graphdef, task.objective, mesh, training=True), params, histories, batches)


def packed_problem(name: str, parts: int, mesh: Any) -> Problem:
    """Of a model whose devices have batches of their own, which one device takes in turn."""
    task, batch_of = PACKED[name], dit_batch if name.startswith("dit") else mm_batch

    def in_turn(model: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, loop.Measured]:
        """In a loop, which is compiled once. Of a single part FP8's histories are written."""
        if parts == 1:
            return task.objective(model, jax.tree.map(lambda x: x[0], batch), jax.random.fold_in(key, 0))
        graphdef, state = nnx.split(model)
        of = lambda n, part: task.objective(nnx.merge(graphdef, state), part, jax.random.fold_in(key, n))[0]
        losses = jax.lax.map(lambda each: each[1].counted() * of(*each), (jnp.arange(parts), batch))
        loss = jnp.sum(losses) / batch.counted()
        return loss, loop.Measured(loss)

    graphdef, params, histories = nnx.split(nnx.eval_shape(lambda: task.model(nnx.Rngs(0))), nnx.Param, ...)
    # New modulations and last layers are zero, and would hide the rest.
    rng = np.random.default_rng(0)
    draw = lambda path, x: put(rng.normal(size=x.shape) / 4 + ("scale" in name_of(path)), x.dtype)
    params = jax.tree.map_with_path(draw, params)
    histories = jax.tree.map(lambda x: put(np.zeros(x.shape, x.dtype)), histories)
    if mesh is None:
        value = loop.make_value(graphdef, in_turn, None, training=True)
        return Problem(value, params, histories, lambda step: batch_of(step, parts))
    own = of_own_batch(task.objective, mesh)
    value = loop.make_value(task.sharded_graphdef(mesh), own, mesh, training=True)
    return Problem(value, params, histories, lambda step: shard_batch(batch_of(step, parts), mesh))


def dit_batch(step: int, parts: int) -> images.Batch:
    """Images that begin and end on different devices, one without tokens, and rows of none."""
    rng = np.random.default_rng(step)
    offsets = np.stack([[0, 4, 4, 10], [0, 6, 6, 8]])[:parts].astype(np.int32)
    grids = np.stack([[[2, 2], [1, 1], [2, 3]], [[3, 2], [1, 1], [1, 2]]])[:parts].astype(np.int32)
    labels = rng.integers(0, 3, (parts, 3)).astype(np.int32)
    return images.Batch(rng.normal(size=(parts, 12, 4)).astype(np.float32), offsets, grids, labels)


def mm_batch(step: int, parts: int) -> Any:
    """Of two devices that share a part both have rows of an even one's image; one has no odd one's."""
    found = []
    for part in range(parts):
        drawn = illustrated(text_of(8, 9, 10 + part), image_of(2, 3, seed=step + part), TOKENS)
        read = captioned(text_of(5, 6), image_of(3, 3 + step % 2, seed=9 * step), TOKENS)
        found.append(lay_out([drawn] if part % 2 else [drawn, read], ROOM))
    return images.stack(found)


class Outcome(NamedTuple):
    loss: jax.Array
    measured: loop.Measured
    histories: nnx.State
    grads: nnx.State | None
    program: str


def outcomes(name: str, shape: str, use_mesh: bool) -> list[Outcome]:
    """Of the first batch; of the decoder in FP8 also of the second one, with the scales of the first. Without gradients
    in FP8."""
    mesh = make_mesh(shape)
    over = mesh if use_mesh else None
    given = decoder_problem(name, over) if name in DECODERS else packed_problem(name, parts_of(mesh), over)
    on = lambda tree: shard_state(tree, mesh) if use_mesh else tree
    params, histories, key = on(given.params), on(given.histories), jax.random.key(0)
    key, found, program = replicate(key, mesh) if use_mesh else key, [], None
    if "fp8" in name:
        of = lambda *arguments: (given.value(*arguments), None)
    else:
        of = jax.value_and_grad(given.value, has_aux=True)
    for step in range(2 if name == "fp8" else 1):
        arguments = params, histories, given.batches(step), key
        program = program or jax.jit(of).lower(*arguments).compile()
        (loss, (measured, histories)), grads = program(*arguments)
        found.append(Outcome(loss, measured, histories, grads, program.as_text()))
    return found


def fraction(x: jax.Array) -> float:
    """The fraction of an array on one device."""
    (share,) = {shard.data.size / x.size for shard in x.addressable_shards}
    return share


def matching(state: Any, pattern: str) -> list[jax.Array]:
    return [x for path, x in jax.tree.leaves_with_path(state) if re.search(pattern, name_of(path))]


EXPERTS, MATRICES = r"moe/((text|image)/)?(gate|up|down)", "kernel|embedding"
ALL_WORDS = r"f32\[(\d+,)+256\]"
# Of each: the mesh, the fractions of matrices on a device, what the program has, and what no device ever has.
CASES = {
    "dense": ("fsdp=4", {1 / 4}, "[16,24]", r"\[2,(16,24|24,16)\]"),  # all layers
    "sparse": ("fsdp=2,expert=2", {1 / 4}, "[2,16,24]", r"\[(2,)?4,(16,24|24,16)\]"),  # all experts
    "much": ("expert=2,tensor=2", {1 / 4, 1 / 2}, "f32[32,128]", ALL_WORDS),  # routers over one axis of the two
    "latent": ("fsdp=2,tensor=2", {1 / 4, 1 / 2}, "f32[32,128]", ALL_WORDS),
    "untied": ("tensor=4", {1 / 4}, "f32[64,64]", ALL_WORDS),
    "dit": ("fsdp=2,tensor=2", {1 / 4, 1 / 2}, "", None),
    "mm": ("fsdp=2,tensor=2", {1 / 4, 1 / 2}, "", None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_that_of_one_device(name):
    """Every parameter's; of the decoders also the loads and the bias of the choice. Steps of the optimizer, and
    evaluations: the next test, and test_launch.py."""
    shape, fractions, has, never = CASES[name]
    (got,), (want,) = (outcomes(name, shape, use_mesh) for use_mesh in (True, False))
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    for (path, ours), wanted in zip(jax.tree.leaves_with_path(got.grads), jax.tree.leaves(want.grads), strict=True):
        assert_close(ours, wanted, "float32", name_of(path), scale=10)
    jax.tree.map(np.testing.assert_array_equal, got.histories, want.histories)
    if name in DECODERS:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), got.measured, want.measured)
    assert {fraction(x) for x in matching(got.grads, EXPERTS)} <= {1 / 4}
    assert {fraction(x) for x in matching(got.grads, MATRICES)} == fractions
    assert has in got.program
    assert never is None or not re.search(never, got.program)


def test_a_step_keeps_the_state_split_and_compiles_once():
    """The state after a step is split as before it, the optimizer's too. The evaluation is that of one device."""
    config, mesh = dataclasses.replace(SPARSE, layers=1), make_mesh("fsdp=2,expert=2")
    task, key = train_lm.LmTask(preset_of(config)), jax.random.key(0)
    alone, params, histories = nnx.split(model_of(config), nnx.Param, ...)
    state = shard_state(loop.init_state(task.preset, jax.tree.map(jnp.copy, params), histories), mesh)
    sharded = task.sharded_graphdef(mesh)
    step = loop.make_step(sharded, task, mesh)
    for number in range(2):
        state, _ = step(state, loop.place(batches_of(task.preset)(number), mesh), replicate(key, mesh))
    assert step._cache_size() == 1
    for part in (state.params, state.opt_state):
        assert {fraction(x) for x in matching(part, f"{MATRICES}|{EXPERTS}")} == {1 / 4}
    heldout = train_lm.heldout_batches(task.preset, CORPUS.heldout)
    losses = [
        loop.make_evaluate(graphdef, task, over)(*given, loop.place(heldout, over), replicate(key, over))
        for graphdef, over, given in (
            (sharded, mesh, (state.params, state.histories)),
            (alone, None, collect((state.params, state.histories), mesh)),
        )
    ]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape"), [("fp8", "data=2,tensor=2"), ("dit fp8", "tensor=4"), ("mm fp8", "tensor=4")]
)
def test_fp8_scales_are_of_all_devices(name, shape):
    """Largest numbers of a whole kernel, of which each device has a part; and losses, the second with their scales.
    Equal up to values at the edge of two numbers of eight bits."""
    for got, want in zip(outcomes(name, shape, True), outcomes(name, shape, False), strict=True):
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-3 if name == "dit fp8" else 2e-3)
        assert len(jax.tree.leaves(got.histories)) == (7 if name == "fp8" else 4)
        for ours, wanted in zip(jax.tree.leaves(got.histories), jax.tree.leaves(want.histories), strict=True):
            np.testing.assert_array_equal(ours[..., 1, :], wanted[..., 1, :])
            np.testing.assert_allclose(ours[..., 0, :], wanted[..., 0, :], rtol=0.05)


def split_part(name: str, params, mesh) -> tuple[Any, Any]:
    """Of a model's part of this name: its parameters' specifications, and what gathers them inside `jax.shard_map`."""
    specs = jax.tree.map_with_path(lambda path, x: split_of((name, *path), x.shape, mesh), params)
    return specs, functools.partial(gather, splits=Splits.of({name: params}, mesh), within=name)


def test_modalities_count_all_rows_once():
    """Over expert=2,tensor=2, with rows of both kinds and of none on each device: results, loss, load, gradients."""
    rng = np.random.default_rng(0)
    (alone, params), (sharded, _) = (
        nnx.split(nnx.eval_shape(lambda of=of: ModalityExperts(MM, sharded=of, rngs=nnx.Rngs(0))))
        for of in (False, True)
    )
    params = drawn_like(params, rng, 0.3)
    x = put(rng.normal(size=(24, MM.width)), jnp.float32)
    rows = x, put(rng.random(24) < 0.6), put(rng.random(24) < 0.8)
    mesh = make_mesh("expert=2,tensor=2")
    specs, whole = split_part("moe", params, mesh)

    def run(graph, params, *rows):
        y, counts = nnx.merge(graph, params)(*rows)
        return y, counts.routed(MM, sharded=graph is sharded)

    over = jax.shard_map(
        lambda params, *rows: run(sharded, whole(params), *rows),
        mesh=mesh,
        in_specs=(specs, *[P(AXES)] * 3),
        out_specs=(P(AXES), P()),
    )

    def value(layer, params, *rows):
        y, routed = layer(params, *rows)
        return jnp.sum(jnp.sin(y)) + routed.aux_loss, (y, routed)

    of = lambda layer: jax.jit(jax.value_and_grad(functools.partial(value, layer), has_aux=True))(params, *rows)
    ((_, (got, routed)), grads), ((_, (want, wanted)), others) = of(over), of(functools.partial(run, alone))
    assert_close(got, want, "float32")
    np.testing.assert_array_equal(routed.load, wanted.load)
    np.testing.assert_allclose(routed.aux_loss, wanted.aux_loss, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        assert_close(ours, theirs, "float32", scale=4)


def test_no_layer_sums_its_routing_over_the_mesh():
    """One sum of all layers' comes after their scan."""
    mesh = make_mesh("fsdp=2,tensor=2")
    given = decoder_problem("latent", mesh)
    arguments = given.params, given.histories, given.batches(0), jax.random.key(0)
    (layers,) = [
        found for found in equations(jax.make_jaxpr(given.value)(*arguments).jaxpr)
        if found.primitive.name == "scan" and "top_k" in str(found.params["jaxpr"])
    ]  # fmt: skip
    names = {inner.primitive.name for inner in equations(layers.params["jaxpr"].jaxpr)}
    assert "ppermute" in names, "parameters are gathered in it"
    assert not [name for name in names if name.startswith(("psum", "all_reduce"))]


def test_what_a_decoder_sends():
    """Of one block: all rows before attention and before the gated unit, in the compute dtype, never in float32."""
    preset = preset_of(dataclasses.replace(UNTIED, dtype="bfloat16", sinks=False))
    mesh, batch = make_mesh("data=2,tensor=2"), batches_of(preset)(0)
    task = train_lm.LmTask(preset)
    params = jax.eval_shape(lambda: loop.first_state(task)[1].params)
    value = loop.make_value(task.sharded_graphdef(mesh), task.heldout_objective, mesh, training=True)
    given = (params, nnx.State({}), jax.tree.map(lambda x: x[0], batch), jax.random.key(0))
    own, all_rows = ((16, 16), "bfloat16"), ((32, 16), "bfloat16")

    def sent(program: Callable, name: str) -> list[tuple[Any, str]]:
        """Shape and dtype of what each collective of the axis `tensor` sends; of loops once."""
        found = [
            equation for equation in equations(jax.make_jaxpr(program)(*given).jaxpr)
            if equation.primitive.name == name and "tensor" in equation.params["axis_name"]
        ]  # fmt: skip
        return [(x.aval.shape, str(x.aval.dtype)) for equation in found for x in equation.invars]

    assert sent(value, "all_gather") == [own] * 3, "a loop over blocks, and the logits"
    assert sent(value, "reduce_scatter") == [all_rows] * 3, "the embeddings, and a loop over blocks"
    gradient = jax.grad(value, has_aux=True)
    assert sent(gradient, "all_gather") == [own] * 8, "the layers' rows again, the logits' not"
    assert sent(gradient, "reduce_scatter") == [all_rows] * 6


def test_what_tensor_does_not_divide():
    mesh, pixels = make_mesh("data=2,tensor=2"), image_of(2, 2)
    pairs = [(pixels, [text_of(1, 2)])] * 5
    material = train_mm.Material(pairs, pairs, None, TOKENS, ROOM._replace(rows=56, predictions=32, documents=6))
    train_mm.check_fits(MM_PRESET, material, mesh)
    assert train_mm.heldout_batches(MM_PRESET, material, mesh).tokens.shape == (2, 2, 28)
    for wrong, error in (
        ({"kv_heads": 1}, "tensor=2 does not divide kv_heads, 1"),
        ({"vocab": 37}, "tensor=2 does not divide the vocabulary, 37: write a model.vocab .* such as 38"),
    ):
        changed = dataclasses.replace(MM_PRESET, model=dataclasses.replace(MM, **wrong))
        with pytest.raises(ValueError, match=error):
            train_mm.check_fits(changed, material, mesh)
    for name, size in (("rows", 54), ("predictions", 34)):
        wrong = material._replace(room=material.room._replace(**{name: size}))
        error = f"^{name} is {size}; with 2 micro-batches and devices, each over tensor=2, write multiples of 4"
        with pytest.raises(ValueError, match=error):
            train_mm.check_fits(MM_PRESET, wrong, mesh)
