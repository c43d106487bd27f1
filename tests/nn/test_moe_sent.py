"""MoE(send_tokens=True) over several devices beside the same layer on one: results, routing, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxops.nn import MoE, Router
from tests.arrays import put
from tests.compare import assert_close
from tests.devices import needs_four
from tests.parallel.cases import mesh_of
from tests.parallel.exchanges import use_kernel

pytestmark = needs_four
T, E, D, F, K = 24, 8, 16, 12, 3
ONE, TWO = ("i",), ("i", "j")


def make(expert_axis=None, *, k: int = K, capacity: int | None = None, **options) -> MoE:
    rngs = nnx.Rngs(0)
    return MoE(
        E, D, F, router=Router(D, E, k, capacity=capacity, rngs=rngs), expert_axis=expert_axis,
        send_tokens=expert_axis is not None, rngs=rngs, **options,
    )  # fmt: skip


def tokens(dtype: str, mask: np.ndarray | None = None) -> tuple:
    """(x, dy); x is large where the mask is False."""
    x, dy = np.random.default_rng(5).normal(size=(2, T, D))
    if mask is not None:
        x[~mask] = 1e3
    return put(x, dtype), put(dy, dtype)


@functools.cache
def step(axis, shape: tuple[int, ...] = (), masked: bool = False, check_vma: bool = True, **options):
    """y, load, losses and gradients of (parameters, x), for (x, dy, mask), with a loss of all of these."""
    graphdef, params = nnx.split(make(axis, **dict(options)))

    def layer(params, x, mask):
        y, routing = nnx.merge(graphdef, params)(x, mask if masked else None)
        return y, routing.load, routing.aux_loss, routing.z_loss

    if axis:
        experts = lambda path, _: P(axis) if path[0].key != "router" else P()
        specs = jax.tree.map_with_path(experts, params), P(axis), P(axis)
        mesh = mesh_of(*shape, names=TWO[: len(shape)])
        outs = P(axis), P(), P(), P()
        layer = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=check_vma)

    def loss(params, x, dy, mask):
        y, load, aux_loss, z_loss = layer(params, x, mask)
        return jnp.sum(y.astype(jnp.float32) * dy) + 2 * aux_loss + 3 * z_loss, (y, load, aux_loss, z_loss)

    def run(params, x, dy, mask):
        (_, outs), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x, dy, mask)
        return *outs, gradients

    return functools.partial(jax.jit(run), params)


CASES = {
    "four": ("i", (4,), {"dtype": "bfloat16"}),
    "both axes": (TWO, (2, 2), {"check_vma": False}),
    "biases": ("i", (2,), {"use_bias": True, "masked": True}),
}


@pytest.mark.parametrize("way", ["padded", "mosaic"])
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case, way, monkeypatch):
    axis, shape, options = CASES[case]
    if way == "mosaic":
        use_kernel(monkeypatch)
    dtype = options.get("dtype", "float32")
    mask = np.random.default_rng(1).random(T) < 0.7 if options.get("masked") else None
    given = *tokens("float32", mask), np.ones(T, bool) if mask is None else mask
    got = step.__wrapped__(axis, shape, **options)(*given)
    want = step(None, **{name: value for name, value in options.items() if name != "check_vma"})(*given)
    np.testing.assert_array_equal(got[1], want[1])
    for found, wanted in zip(got[2:4], want[2:4], strict=True):  # the router sees unrounded tokens
        assert_close(found, wanted, "float32", scale=5)
    for (path, found), wanted in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(np.asarray(wanted, np.float32)).all(), name
        assert_close(found, wanted, dtype, scale=5, roundings=2)


def test_all_tokens_to_one_device_and_dropped_ones():
    """With room for fewer tokens the last devices' are dropped: marked, without results and gradients."""
    mesh, layer = mesh_of(2, names=("i",)), make("i", k=1)
    layer.received_rows = 15
    assert isinstance(layer.router, Router)
    layer.router.kernel[...] = jnp.zeros((D, E)).at[:, 1].set(1.0)
    graphdef, params = nnx.split(layer)
    experts = lambda path, _: P("i") if path[0].key != "router" else P()

    def f(params, x):
        y, routing = nnx.merge(graphdef, params)(x)
        return y, routing.row_positions, routing.weights, routing.group_offsets[-1:]

    specs = jax.tree.map_with_path(experts, params), P("i")
    split = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("i"))
    x = jnp.abs(tokens("float32")[0])
    y, positions, weights, rows = jax.jit(split)(params, x)
    np.testing.assert_array_equal(rows, [12, 3])
    dropped = np.arange(T) >= 15
    np.testing.assert_array_equal(positions[:, 0] == T // 2, dropped)
    np.testing.assert_array_equal(weights[:, 0] == 0, dropped)
    np.testing.assert_array_equal((y == 0).all(axis=1), dropped)
    dx = jax.jit(jax.grad(lambda x: jnp.sum(split(params, x)[0])))(x)
    np.testing.assert_array_equal((dx == 0).all(axis=1), dropped)


class FirstExpert(Router):
    def __call__(self, x, mask=None):
        return self.choose(self.logits(x), mask)


def test_errors():
    alone = make()
    alone.received_rows = 3
    with pytest.raises(ValueError, match="received_rows=3 needs send_tokens=True"):
        alone(tokens("float32")[0])
    with pytest.raises(ValueError, match="send_tokens=True needs expert_axis, and replaces gather_tokens"):
        MoE(E, D, F, router=lambda x: x, send_tokens=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="send_tokens=True needs expert_axis, and replaces gather_tokens"):
        make("i", gather_tokens=True)
    layers = [make("i", capacity=3), make("i")]
    layers[1].router = FirstExpert(D, E, K, rngs=nnx.Rngs(0))
    for layer in layers:
        call = jax.shard_map(
            lambda x, layer=layer: layer(x)[0], mesh=mesh_of(1, names=("i",)), in_specs=P("i"), out_specs=P("i")
        )
        with pytest.raises(ValueError, match="send_tokens=True needs a `Router` without a capacity"):
            jax.eval_shape(call, tokens("float32")[0])
