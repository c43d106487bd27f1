"""Training over meshes of four devices is training on one: loss, gradient, parameters; and what is split really is."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from models import decoder
from models.decoder import Decoder
from models.dit import DiT, DiTConfig, loss_fn
from models.images import Batch
from models.mesh import AXES, gather, make_mesh, own_rows, shard_batch, shard_state, shardings, split_objective
from tests.compare import assert_close
from tests.hopper import H200
from tests.models.mesh_run import DENSE, SPARSE, train

pytestmark = pytest.mark.skipif(jax.device_count() != 4, reason="needs four devices")
alone = functools.cache(train)


def fraction(x: jax.Array) -> float:
    """How much of it lies on one device."""
    (share,) = {shard.data.size / x.size for shard in x.addressable_shards}
    return share


def experts(state) -> list[jax.Array]:
    return [leaf for path, leaf in jax.tree.leaves_with_path(state) if re.search(r"moe/(gate|up|down)", jax.tree_util.keystr(path, simple=True, separator="/"))]


def matrices(state) -> list[jax.Array]:
    return [leaf for path, leaf in jax.tree.leaves_with_path(state) if re.search("kernel|embedding", jax.tree_util.keystr(path))]


def assert_as_alone(config, got):
    want = alone(config)
    for (path, ours), wanted in zip(jax.tree.leaves_with_path(got.first), jax.tree.leaves(want.first), strict=True):
        assert_close(ours, wanted, "float32", jax.tree_util.keystr(path), scale=5)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    for (path, ours), wanted in zip(jax.tree.leaves_with_path(got.state.params), jax.tree.leaves(want.state.params), strict=True):
        # Adam divides by the gradient's size: where that is nearly zero, its error is not.
        np.testing.assert_allclose(ours, wanted, atol=1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("shape", "config", "share"), [("data=4", DENSE, 1), ("fsdp=4", DENSE, 1 / 4), ("data=2,fsdp=2", SPARSE, 1 / 2), ("data=2,expert=2", SPARSE, 1)]
)
def test_as_on_one_device(shape, config, share):
    """share: of each matrix of parameters, moments and gradients but the experts', how much a device has. The matrices of FSDP are put together by layers."""
    remat = shape == "fsdp=4"
    got = train(dataclasses.replace(config, remat=remat), make_mesh(shape))
    assert_as_alone(config, got)
    for part in (got.state.params, got.state.opt_state, got.first[1]):
        assert {fraction(x) for x in matrices(part)} == {share}
        assert {fraction(x) for x in experts(part)} == ({1 / 2} if config.experts else set())
    if shape == "data=2,expert=2":
        assert "[2,16,24]" in got.program, "a layer's experts of one device"
        assert not re.search(r"\[(2,)?4,(16,24|24,16)\]", got.program), "no device ever has all experts"
    if remat:
        assert "[16,24]" in got.program, "a layer's gates or ups, put together"
        assert not re.search(r"\[2,(16,24|24,16)\]", got.program), "no device ever has all layers'"


def test_kernels():
    """Pallas' interpreter cannot follow varying axes; below the kernels' own types are checked."""
    assert_as_alone(SPARSE, train(dataclasses.replace(SPARSE, backend="pallas"), make_mesh("data=2,expert=2"), check_vma=False))


def test_kernels_say_over_which_axes_their_results_vary():
    """The gradient traced for H200s that are not there: the kernels are in it, and shard_map has checked them."""
    mesh = AbstractMesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3, abstract_device=H200)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(dataclasses.replace(SPARSE, sharded=True, backend="pallas"), rngs=nnx.Rngs(0))))

    def objective(params, histories, windows, key):
        loss, routed = decoder.loss_fn(nnx.merge(graphdef, params, copy=True), windows)
        return loss + jnp.mean(routed.aux_loss), ((), histories)

    with jax.sharding.use_abstract_mesh(mesh):
        windows, key = jax.ShapeDtypeStruct((8, 9), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
        text = str(jax.make_jaxpr(jax.grad(split_objective(objective, mesh), has_aux=True))(params, (), windows, key))
    assert all(f"name={name}\n" in text for name in ("route_choose", "route_bwd", "permute", "grouped_glu_fwd", "grouped_matmul_wgrad"))


def test_parts_count_what_they_hold():
    """A toy: parts of unlike weights, keys and histories."""
    mesh = make_mesh("data=2,fsdp=2")
    params, x = {"kernel": jnp.arange(12.0).reshape(4, 3)}, np.arange(32, dtype=np.float32).reshape(8, 4)
    counts = np.array([1, 0, 2, 2, 0, 0, 1, 0], np.float32)

    def objective(params, histories, batch, key):
        x, counts = batch
        per_row = jnp.sum(jnp.sin(x @ gather(params)["kernel"]), axis=1)
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
    """Each device has a packed batch of its own, and its own noise; the parameters are put together at once."""
    mesh, config = make_mesh("fsdp=4"), DiTConfig(1, 8, 2, 4, 3, 6, backend="xla")
    graphdef, params = nnx.split(nnx.jit(lambda: DiT(config, rngs=nnx.Rngs(0)))(), nnx.Param)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: p + rng.normal(size=p.shape).astype(np.float32), params)  # a new DiT gives zero, whatever it is given
    offsets, grids = np.tile(np.array([0, 4, 10], np.int32), (4, 1)), np.tile(np.array([[2, 2], [2, 3]], np.int32), (4, 1, 1))
    tokens, labels = rng.normal(size=(4, 10, 4)).astype(np.float32), np.arange(8, dtype=np.int32).reshape(4, 2) % 3
    batch = Batch(tokens=tokens, labels=labels, sequence_offsets=offsets, grids=grids)

    def objective(params, histories, batch, key):
        model = nnx.merge(graphdef, params, copy=True)
        nnx.update(model, gather(nnx.state(model, nnx.Param)))
        return loss_fn(model, jax.tree.map(lambda x: x[0], batch), key), ((), histories)

    def wanted(params, key):
        keys = jax.vmap(lambda part: jax.random.fold_in(key, part))(jnp.arange(4))
        return jnp.mean(jax.lax.map(lambda given: loss_fn(nnx.merge(graphdef, params), *given), (batch, keys)))

    key, split = jax.random.key(1), shard_state(params, mesh)
    assert min(fraction(x) for x in matrices(split)) == max(fraction(x) for x in matrices(split)) == 1 / 4
    loss, _ = jax.jit(split_objective(objective, mesh))(split, (), shard_batch(batch, mesh), key)
    assert_close(loss, jax.jit(wanted)(params, key), "float32", scale=10)


def test_what_is_whole_on_each_device():
    """Norms, biases, histories and counts; of a model with FP8 and untied logits, too."""
    mesh, config = make_mesh("fsdp=2,expert=2"), dataclasses.replace(SPARSE, recipe="delayed", tie_embeddings=False, qk_norm=True)
    shapes = nnx.eval_shape(lambda: nnx.state(Decoder(config, rngs=nnx.Rngs(0))))
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): split.spec for path, split in jax.tree.leaves_with_path(shardings(shapes, mesh))}
    assert {name.split("/")[-2] for name, split in names.items() if split == P()} == {"scale", "amax_history"}
    assert names["blocks/mlp/moe/down/value"] == P(None, "expert", "fsdp")
    assert names["blocks/mlp/moe/router/kernel/value"] == P(None, "fsdp")
    assert names["head/kernel/value"] == P("fsdp")


@pytest.mark.parametrize("shape", ["data", "model=4", "data=0", "data=4,", "data=two", ""])
def test_a_mesh_that_is_none(shape):
    with pytest.raises(typer.BadParameter, match=r"is not one of data=N, fsdp=N, expert=N"):
        make_mesh(shape)


def test_what_does_not_fit():
    with pytest.raises(typer.BadParameter, match="is for 2 devices, and there are 4"):
        make_mesh("data=2")
    mesh = make_mesh("expert=4")
    with pytest.raises(typer.BadParameter, match=r"expert=4 does not divide axis 1 of moe/gate \[2, 6, 4, 4\]: write a number that divides 6"):
        shardings({"moe": {"gate": jnp.zeros((2, 6, 4, 4))}}, mesh)
    with pytest.raises(typer.BadParameter, match="a batch of 6 cannot be split evenly over the 4 devices"):
        own_rows(6, mesh)
