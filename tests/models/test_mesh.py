"""A mesh by itself: what is split and where, sums over devices, and meshes that are none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from models.data import packing
from models.decoder import Decoder, Experts
from models.distributed import mesh as mesh_module
from models.distributed.mesh import (
    AXES,
    Splits,
    collect,
    constrained,
    gather,
    make_mesh,
    replicate,
    rows_of_process,
    shard_batch,
    shard_state,
    shardings,
    split_objective,
)
from models.training import lm as train_lm
from models.training import loop
from tests.arrays import drawn_like, put
from tests.compare import assert_close
from tests.devices import needs_four
from tests.hopper import H200
from tests.models.test_mesh_models import SPARSE, preset_of

pytestmark = needs_four


def on_kernels(mesh):
    """The gradient of a model on Pallas' kernels as a function of (params, histories, batch, key)."""
    task = train_lm.LmTask(preset_of(dataclasses.replace(SPARSE, backend="pallas")))
    graphdef = task.sharded_graphdef(mesh)

    def objective(params, histories, batch, key):
        loss, measured = task.objective(nnx.merge(graphdef, params, copy=True), batch, key)
        return loss, (measured, histories)

    return jax.grad(split_objective(objective, mesh, counted=lambda batch: batch.counted()), has_aux=True)


@pytest.mark.parametrize(
    "options", [{"clamp": 7.0, "expert_bias": True}, {"recipe": "rowwise"}], ids=["gpt-oss", "fp8"]
)
def test_experts_on_two_devices(options):
    """As those of one device with all. The devices' results are sent in dtype, here float32; in FP8 the scales are
    those of single rows or columns."""
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
    assert_close(got, want, "float32")


def test_kernels_say_over_which_axes_their_results_vary():
    """The gradient traced for absent H200s: the kernels are in it, and shard_map has checked them. Their values over
    devices: tests/contracts/test_transforms.py."""
    mesh = AbstractMesh((2, 2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 4, abstract_device=H200)
    params = jax.eval_shape(lambda: loop.first_state(train_lm.LmTask(preset_of(SPARSE)))[1].params)
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


def test_a_state_is_split_as_its_parameters_not_as_xla_would():
    """XLA would leave what a step makes of whole arrays whole on each device."""
    mesh, whole = make_mesh("fsdp=4"), {"kernel": jnp.ones((8, 4))}
    (split,) = jax.jit(lambda state: constrained(state, mesh))(replicate(whole, mesh)).values()
    assert {shard.data.shape for shard in split.addressable_shards} == {(2, 4)}


def test_the_whole_arrays_after_a_training(monkeypatch):
    """On one device, or on the host where they take more than half of a device's memory."""
    mesh, whole = make_mesh("fsdp=4"), {"kernel": jnp.arange(32.0).reshape(8, 4)}
    for limit, kind in ((np.inf, jax.Array), (0, np.ndarray)):
        monkeypatch.setattr(mesh_module, "device_bytes", lambda limit=limit: limit)
        (got,) = collect(shard_state(whole, mesh), mesh).values()
        assert isinstance(got, kind)
        np.testing.assert_array_equal(got, whole["kernel"])


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        *((shape, "is not one of data=N, fsdp=N, expert=N, tensor=N") for shape in ("model=4", "data=0", "data=4,")),
        ("data=1,data=4", "'data=1,data=4' names data twice"),
        ("data=2", "is for 2 devices, and there are 4"),
    ],
)
def test_a_mesh_that_is_none(shape, says):
    with pytest.raises(typer.BadParameter, match=says):
        make_mesh(shape)


def test_what_does_not_fit():
    mesh = make_mesh("expert=4")
    says = r"expert=4 does not divide axis 1 of moe/gate \[2, 6, 4, 4\]: write a number that divides 6"
    with pytest.raises(typer.BadParameter, match=says):
        shardings({"moe": {"gate": jnp.zeros((2, 6, 4, 4))}}, mesh)
    with pytest.raises(typer.BadParameter, match="a batch of 6 cannot be split evenly over the 4 devices"):
        rows_of_process(6, mesh)
