"""Training over meshes of four devices is training on one: loss, gradient, parameters; and what is split really is."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxops.offload import Policy
from models.data import packing
from models.data.images import Batch
from models.data.text import split
from models.decoder import Decoder, DecoderConfig, Experts
from models.distributed.mesh import (
    AXES,
    Splits,
    gather,
    make_mesh,
    of_own_batch,
    replicate,
    rows_of_process,
    shard_batch,
    shard_state,
    shardings,
    split_objective,
    split_of,
)
from models.dit.model import DiT, DiTConfig, loss_fn
from models.training import dit as train_dit
from models.training import lm as train_lm
from models.training import loop
from models.training.presets import Preset
from tests.arrays import drawn_like, put
from tests.compare import assert_close
from tests.devices import needs_four
from tests.hopper import H200
from tests.models.test_decoder_parts import model_of

pytestmark = needs_four
SPARSE = DecoderConfig(256, 16, 2, 2, 2, 8, 24, experts=4, top_k=2, tie_embeddings=True, backend="xla")
DENSE = dataclasses.replace(SPARSE, experts=0, top_k=0, tie_embeddings=False)
LENGTHS = np.random.default_rng(1).integers(2, 30, 40)
CORPUS = split(
    packing.Documents(
        np.random.default_rng(0).integers(0, 256, LENGTHS.sum(), dtype=np.uint8), np.cumsum([0, *LENGTHS])
    )
)


class Outcome(NamedTuple):
    """Results of the steps, and their program; `first` is the state after the first step, `heldout` the loss before."""

    first: Any
    metrics: list[loop.Metrics]
    heldout: jax.Array
    program: str


def preset_of(config: DecoderConfig, accumulate: int = 1) -> Preset:
    """With a document a row: the devices count different numbers of tokens."""
    return Preset(
        config,
        8,
        8,
        steps=8,
        learning_rate=1e-2,
        warmup_steps=1,
        eval_every=8,
        pack=False,
        buckets=1,
        balance_weight=0.1,
        accumulate=accumulate,
    )


def batches_of(preset: Preset) -> Callable[[int], packing.Batch]:
    return train_lm.make_batches(preset, CORPUS.train, train_lm.make_rows(preset, CORPUS.train))


@jax.jit
def copied(state: Any) -> Any:
    """A step takes the memory of the state before. One program for all arrays, which stay split as they are."""
    return jax.tree.map(jnp.copy, state)


def first_state(config: DecoderConfig, accumulate: int = 1) -> tuple[nnx.GraphDef, loop.TrainState]:
    """With drawn parameters, in memory that steps may overwrite."""
    graphdef, drawn, histories = nnx.split(model_of(config), nnx.Param, ...)
    params = jax.tree.map(lambda x: put(np.array(x)), drawn)
    zeros = jax.tree.map(lambda x: put(np.zeros(x.shape, x.dtype)), histories)
    return graphdef, loop.init_state(preset_of(config, accumulate), params, zeros)


@functools.cache
def train(config: DecoderConfig, shape: str | None = None, accumulate: int = 1, evaluates: bool = True) -> Outcome:
    mesh, preset = None if shape is None else make_mesh(shape), preset_of(config, accumulate)
    graphdef, state = first_state(dataclasses.replace(config, policy=None), accumulate)
    if mesh is not None:
        graphdef, state = train_lm.sharded_graphdef(preset, mesh), shard_state(state, mesh)
    key = replicate(jax.random.key(0), mesh)
    batches = [loop.place(batches_of(preset)(step), mesh) for step in range(3)]
    # Compiled before it is called, it takes no other shardings: each step's state is split as the one before.
    step = train_lm.make_step(graphdef, preset, mesh).lower(state, batches[0], key).compile()
    before = jnp.zeros(())
    if evaluates:
        heldout = loop.place(train_lm.heldout_batches(preset, CORPUS.heldout), mesh)
        before = train_lm.make_evaluate(graphdef, preset, mesh)(state.params, state.histories, heldout, key)
    state, metrics = step(state, batches[0], key)
    first, read = copied(state), [metrics]
    for batch in batches[1:]:
        state, metrics = step(state, batch, key)
        read.append(metrics)
    return Outcome(first, read, before, step.as_text())


def fraction(x: jax.Array) -> float:
    """The fraction of an array on one device."""
    (share,) = {shard.data.size / x.size for shard in x.addressable_shards}
    return share


def split_part(name: str, params, mesh) -> tuple[Any, Any]:
    """Of a model's part of this name: its parameters' specifications, and what gathers them inside `jax.shard_map`."""
    specs = jax.tree.map_with_path(lambda path, x: split_of((name, *path), x.shape, mesh), params)
    return specs, functools.partial(gather, splits=Splits.of({name: params}, mesh), within=name)


def experts(state) -> list[jax.Array]:
    return [
        leaf
        for path, leaf in jax.tree.leaves_with_path(state)
        if re.search(r"moe/(gate|up|down)", jax.tree_util.keystr(path, simple=True, separator="/"))
    ]


def matrices(state) -> list[jax.Array]:
    return [
        leaf
        for path, leaf in jax.tree.leaves_with_path(state)
        if re.search("kernel|embedding", jax.tree_util.keystr(path))
    ]


def assert_same(got, want):
    for (path, ours), wanted in zip(
        jax.tree.leaves_with_path(got.first.opt_state), jax.tree.leaves(want.first.opt_state), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if ".nu[" in name:  # squares of the gradient, with twice its error
            ours, wanted = np.sqrt(ours), np.sqrt(wanted)
        assert_close(ours, wanted, "float32", name, scale=10)
    jax.tree.map(lambda ours, wanted: np.testing.assert_allclose(ours, wanted, rtol=1e-4), got.metrics, want.metrics)
    np.testing.assert_allclose(got.heldout, want.heldout, rtol=1e-5)
    kept = lambda of: (of.first.params, of.first.average)
    for (path, ours), wanted in zip(jax.tree.leaves_with_path(kept(got)), jax.tree.leaves(kept(want)), strict=True):
        # Adam divides by the gradient's size: where that is nearly zero, its error is not.
        np.testing.assert_allclose(ours, wanted, atol=1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(("shape", "config"), [("fsdp=4", DENSE), ("fsdp=2,expert=2", SPARSE)])
def test_as_on_one_device(shape, config):
    """A device stores a quarter of each matrix and of its moments. FSDP gathers its matrices layer by layer.

    Over data=2,fsdp=2: test_launch.py.
    """
    remat = shape == "fsdp=4"  # and an evaluation
    policy = Policy() if remat else None
    got = train(dataclasses.replace(config, policy=policy), shape, accumulate=2 if remat else 1, evaluates=remat)
    assert_same(got, train(config, evaluates=remat))
    for part in (got.first.params, got.first.opt_state):
        assert {fraction(x) for x in matrices(part)} == {1 / 4}
        assert {fraction(x) for x in experts(part)} == ({1 / 4} if config.experts else set())
    if config.experts:
        assert "[2,16,24]" in got.program, "a layer's experts of one device, put together"
        assert not re.search(r"\[(2,)?4,(16,24|24,16)\]", got.program), "no device ever has all experts"
    if remat:
        assert "[16,24]" in got.program, "a layer's gates or ups, put together"
        assert not re.search(r"\[2,(16,24|24,16)\]", got.program), "no device ever has all layers'"


def on_kernels(mesh):
    """The gradient of a model on Pallas' kernels as a function of (params, histories, batch, key)."""
    preset = preset_of(dataclasses.replace(SPARSE, backend="pallas"))
    graphdef = train_lm.sharded_graphdef(preset, mesh)

    def objective(params, histories, batch, key):
        loss, measured = train_lm.objective(preset, preset.pack, nnx.merge(graphdef, params, copy=True), batch, key)
        return loss, (measured, histories)

    return jax.grad(split_objective(objective, mesh, counted=lambda batch: batch.counted()), has_aux=True)


@pytest.mark.parametrize(
    "options", [{"clamp": 1.0, "dtype": "bfloat16"}, {"recipe": "rowwise"}], ids=["clamped", "fp8"]
)
def test_a_sum_over_devices_is_rounded_once(options):
    """Clamped experts on two devices give the bits of one device with all: sums are float32.

    In FP8 the devices' results are sent in dtype, here float32; the scales are those of single rows or columns.
    """
    mesh = jax.make_mesh((1, 1, 2, 1), AXES, devices=jax.devices()[:2], axis_types=(AxisType.Auto,) * 4)
    config = dataclasses.replace(SPARSE, **options)
    (alone, params), (sharded, _) = (
        nnx.split(nnx.eval_shape(lambda of=of: Experts(config, sharded=of, rngs=nnx.Rngs(0)))) for of in (False, True)
    )
    params = drawn_like(params, np.random.default_rng(1), 0.3)
    x = put(np.random.default_rng(0).normal(size=(2, 12, config.width)), config.dtype)
    specs = jax.tree.map_with_path(
        lambda path, _: P() if "router" in jax.tree_util.keystr(path) else P("expert"), params
    )
    run = jax.shard_map(
        lambda params, x: nnx.merge(sharded, params)(x)[0], mesh=mesh, in_specs=(specs, P(AXES)), out_specs=P(AXES)
    )
    got, want = jax.jit(run)(params, x), jax.jit(lambda params, x: nnx.merge(alone, params)(x)[0])(params, x)
    assert got.dtype == want.dtype == config.dtype
    if config.recipe is None:
        np.testing.assert_array_equal(got, want)
    else:
        assert_close(got, want, "float32")


def test_kernels_say_over_which_axes_their_results_vary():
    """The gradient traced for absent H200s: the kernels are in it, and shard_map has checked them. Their values over
    devices: tests/contracts/test_transforms.py."""
    mesh = AbstractMesh((2, 2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 4, abstract_device=H200)
    params = jax.eval_shape(lambda: train_lm.init_state(preset_of(SPARSE), 0)[1].params)
    with jax.sharding.use_abstract_mesh(mesh):
        rows, key = jax.ShapeDtypeStruct((8, 8), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
        text = str(jax.make_jaxpr(on_kernels(mesh))(params, (), packing.Batch(rows, rows, rows), key))
    assert all(
        f"name={name}\n" in text
        for name in ("route_fwd", "route_bwd", "permute", "grouped_glu_fwd", "grouped_matmul_wgrad")
    )


def test_parts_count_what_they_hold():
    """A toy model with different weights, keys and histories in its parts."""
    mesh = make_mesh("data=2,fsdp=2")
    params, x = {"kernel": jnp.arange(12.0).reshape(4, 3)}, np.arange(32, dtype=np.float32).reshape(8, 4)
    counts, splits = np.array([1, 0, 2, 2, 0, 0, 1, 0], np.float32), Splits.of(params, mesh)

    def objective(params, histories, batch, key):
        x, counts = batch
        per_row = jnp.sum(jnp.sin(x @ gather(params, splits)["kernel"]), axis=1)
        loss = jnp.sum(counts * per_row) / jnp.maximum(jnp.sum(counts), 1)
        return loss, (jax.random.uniform(key), jnp.maximum(histories, jnp.max(x)))

    whole = split_objective(objective, mesh, counted=lambda batch: jnp.sum(batch[1]))
    arguments = (shard_state(params, mesh), jnp.array([100.0, 0.0]), shard_batch((x, counts), mesh), jax.random.key(0))
    (loss, (drawn, histories)), grads = jax.jit(jax.value_and_grad(whole, has_aux=True))(*arguments)

    def wanted(params):
        return jnp.sum(counts * jnp.sum(jnp.sin(x @ params["kernel"]), axis=1)) / 6

    assert_close(loss, wanted(params), "float32", scale=10)
    assert_close(grads["kernel"], jax.grad(wanted)(params)["kernel"], "float32", scale=10)
    np.testing.assert_array_equal(histories, [100.0, 31.0])
    keys = [jax.random.uniform(jax.random.fold_in(jax.random.key(0), part)) for part in range(4)]
    assert_close(drawn, np.dot([1, 4, 0, 1], keys) / 6, "float32")


def test_dit():
    """Each device has its own packed batch and noise."""
    mesh, config = make_mesh("fsdp=4"), DiTConfig(1, 8, 2, 4, 3, 6, backend="xla")
    graphdef, params = nnx.split(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))), nnx.Param)
    rng = np.random.default_rng(0)
    params = drawn_like(params, rng)  # a new DiT gives zero, whatever it is given
    offsets, grids = (
        np.tile(np.array([0, 4, 10], np.int32), (4, 1)),
        np.tile(np.array([[2, 2], [2, 3]], np.int32), (4, 1, 1)),
    )
    tokens, labels = rng.normal(size=(4, 10, 4)).astype(np.float32), np.arange(8, dtype=np.int32).reshape(4, 2) % 3
    batch = Batch(tokens=tokens, labels=labels, sequence_offsets=offsets, grids=grids)

    sharded = train_dit.sharded_graphdef(config, mesh)
    value = loop.make_value(
        sharded, of_own_batch(functools.partial(train_dit.objective, label_dropout=0.1), mesh), mesh, training=True
    )

    def wanted(params, key):
        keys = jax.vmap(lambda part: jax.random.fold_in(key, part))(jnp.arange(4))
        return jnp.mean(jax.lax.map(lambda given: loss_fn(nnx.merge(graphdef, params), *given), (batch, keys)))

    key, split = jax.random.key(1), shard_state(params, mesh)
    assert min(fraction(x) for x in matrices(split)) == max(fraction(x) for x in matrices(split)) == 1 / 4
    loss, _ = jax.jit(value)(split, nnx.State({}), shard_batch(batch, mesh), key)
    assert_close(loss, jax.jit(wanted)(params, key), "float32", scale=10)


def test_what_is_whole_on_each_device():
    """Norms, biases, histories and counts; of a model with FP8 and untied logits, too."""
    mesh, config = (
        make_mesh("fsdp=2,expert=2"),
        dataclasses.replace(SPARSE, recipe="delayed", tie_embeddings=False, qk_norm=True),
    )
    shapes = nnx.eval_shape(lambda: nnx.state(Decoder(config, rngs=nnx.Rngs(0))))
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/"): split.spec
        for path, split in jax.tree.leaves_with_path(shardings(shapes, mesh))
    }
    assert {name.split("/")[-2] for name, split in names.items() if split == P()} == {"scale", "amax_history"}
    assert names["blocks/mlp/moe/down/value"] == P(None, ("expert", "fsdp"))
    assert names["blocks/mlp/moe/router/kernel/value"] == P(None, ("fsdp", "expert"))
    assert names["head/kernel/value"] == P(("fsdp", "expert"))


def test_where_shards_are():
    """Along the first axis that may be split and that all axes of `SHARDS` divide; otherwise over fewer of them."""
    mesh = make_mesh("data=2,fsdp=2")
    shapes = {
        "kernel": [(2, 8, 4), (8, 4), (6, 4)],
        "moe/up": [(3, 4, 2, 6), (3, 2, 4, 6), (3, 2, 2, 6)],
        "embedding": [(8, 2), (6, 4), (3, 6)],
        "scale": [(2, 8)],
    }
    arrays = {f"params/{name}": [jnp.zeros(shape) for shape in some] for name, some in shapes.items()}
    found = jax.tree.map(lambda sharding: sharding.spec, shardings(arrays, mesh))
    both = ("fsdp", "data")
    assert found["params/kernel"] == [P(None, both), P(both), P("fsdp")]
    assert found["params/moe/up"] == [P(None, both), P(None, None, both), P(None, "fsdp")]
    assert found["params/embedding"] == [P(both), P(None, both), P(None, "fsdp")]
    assert found["params/scale"] == [P()]


@pytest.mark.parametrize("devices", [[256, 1, 0, 0], [256, 0, 1, 0]], ids=["over fsdp", "over data"])
@pytest.mark.parametrize("rows", [4, 2], ids=["shards over data", "whole over data"])
@pytest.mark.parametrize(("sums", "large"), [("float32", 257), ("bfloat16", 256)])
def test_gradients_are_summed_in_the_chosen_dtype(sums, large, devices, rows):
    """256 + 1 is 256 in bfloat16. Routers and norms are float32 in any case."""
    mesh = make_mesh("data=2,fsdp=2")
    params = {"kernel": jnp.ones((rows, 2)), "router": {"kernel": jnp.ones((rows, 2))}, "scale": jnp.ones((1, rows))}
    splits = Splits.of(params, mesh)

    def objective(params, histories, batch, key):
        whole = gather(params, splits, dtype="bfloat16", sums=sums)
        kernel, router, scale = whole["kernel"], whole["router"]["kernel"], whole["scale"]
        assert [x.dtype for x in (kernel, router, scale)] == [jnp.bfloat16, jnp.float32, jnp.float32]
        loss = jnp.sum(batch.astype(jnp.bfloat16) @ kernel) + jnp.sum(batch @ router) + jnp.sum(batch * scale)
        return 4 * loss, ((), ())  # each device counts for a quarter

    x = jnp.array(devices, jnp.float32)[:, None] * jnp.ones((1, rows))
    grad = jax.jit(jax.grad(split_objective(objective, mesh), has_aux=True))
    grads, _ = grad(shard_state(params, mesh), (), shard_batch(x, mesh), jax.random.key(0))
    want = {"kernel": large, "router": {"kernel": 257}, "scale": 257}
    jax.tree.map(lambda g, p, each: np.testing.assert_array_equal(g, jnp.full_like(p, each)), grads, params, want)


@pytest.mark.parametrize("shape", ["data", "model=4", "data=0", "data=4,", "data=two", ""])
def test_a_mesh_that_is_none(shape):
    with pytest.raises(typer.BadParameter, match=r"is not one of data=N, fsdp=N, expert=N, tensor=N"):
        make_mesh(shape)


def test_what_does_not_fit():
    with pytest.raises(typer.BadParameter, match="'data=1,data=4' names data twice"):
        make_mesh("data=1,data=4")
    with pytest.raises(typer.BadParameter, match="is for 2 devices, and there are 4"):
        make_mesh("data=2")
    mesh = make_mesh("expert=4")
    with pytest.raises(
        typer.BadParameter,
        match=r"expert=4 does not divide axis 1 of moe/gate \[2, 6, 4, 4\]: write a number that divides 6",
    ):
        shardings({"moe": {"gate": jnp.zeros((2, 6, 4, 4))}}, mesh)
    with pytest.raises(typer.BadParameter, match="a batch of 6 cannot be split evenly over the 4 devices"):
        rows_of_process(6, mesh)
