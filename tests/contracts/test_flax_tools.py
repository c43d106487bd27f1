"""Flax's own tools over every layer: tables, views, state, copies and lifted transformations."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops.nn import Fp8DotGeneral, Fp8Linear
from tests.contracts.layers import LAYERS, MAKERS
from tests.contracts.run import small

pytestmark = pytest.mark.versions

MADE = {layer.name.removeprefix("nn."): layer for layer in LAYERS}
# How it is made and what it is called with; recipe "delayed" is the one with a state that a call changes.
EVERY = {name: (make, name) for name, make in MAKERS.items()} | {
    "Fp8Linear-delayed": (lambda rngs, **how: Fp8Linear(12, 8, recipe="delayed", rngs=rngs, **how), "Fp8Linear"),
    "Fp8DotGeneral": (
        lambda rngs, **how: nnx.Linear(12, 8, dot_general=Fp8DotGeneral("delayed", **how), rngs=rngs),
        "Fp8Linear",
    ),
}


def made(name: str, seed: int = 0) -> nnx.Module:
    return EVERY[name][0](nnx.Rngs(seed), backend="xla")


def inputs(name: str) -> list[jax.Array]:
    entry = MADE[EVERY[name][1]]
    given = small(entry)
    return [jnp.asarray(given[argument]) for argument in entry.shapes(entry.sizes) if argument != "params"]


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, a), jax.tree.map(np.asarray, b))


@pytest.mark.parametrize("name", EVERY)
def test_tables(name, capsys):
    """Of the layer inside of a model that returns a tuple. Then a new layer runs: a table that fails leaves wrapped
    methods in the class. Traced alone, so that nothing is compiled."""
    layer, x = made(name), inputs(name)

    class Model(nnx.Module):
        def __init__(self):
            self.layer = layer

        def __call__(self, *x):
            return x[0], {"result": [self.layer(*x)]}

    tables = []
    width = {"width": 400, "force_terminal": False}
    nnx.eval_shape(lambda model, *x: tables.append(nnx.tabulate(model, *x, console_kwargs=width)), Model(), *x)
    assert f" {type(layer).__name__} " in tables[0]
    assert f"Total Parameters: {sum(value.size for value in jax.tree.leaves(nnx.state(layer))):,} " in tables[0]
    assert f" {x[0].dtype}[{','.join(map(str, x[0].shape))}]" in tables[0]
    nnx.eval_shape(lambda layer, *x: layer(*x), made(name), *x)
    nnx.display(layer)
    assert type(layer).__name__ in capsys.readouterr().out + repr(layer)


@pytest.mark.parametrize("name", EVERY)
def test_state(name):
    layer, x = made(name), inputs(name)
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    shapes = nnx.state(nnx.eval_shape(lambda: made(name)))
    jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), nnx.state(layer), shapes)
    assert jax.tree.leaves(params)
    assert not jax.tree.leaves(nnx.filter_state(rest, nnx.Param))
    other = made(name, seed=1)
    nnx.update(other, params, rest)
    state = nnx.state(made(name, seed=1))
    nnx.replace_by_pure_dict(state, nnx.to_pure_dict(nnx.state(layer)))
    copies = [
        nnx.merge(graphdef, params, rest), nnx.merge(graphdef, state), nnx.clone(layer), copy.deepcopy(layer), other,
        nnx.view(layer), pickle.loads(pickle.dumps(layer)),
    ]  # fmt: skip
    for each in copies:
        same(nnx.state(each), nnx.state(layer))
        assert nnx.graphdef(each) == graphdef
    assert [type(module) for _, module in nnx.iter_modules(layer)][-1] is type(layer)
    assert len([node for _, node in nnx.iter_graph(layer) if isinstance(node, nnx.Param)]) == len(
        jax.tree.leaves(params)
    )
    want = nnx.eval_shape(lambda layer, *x: layer(*x), layer, *x)
    assert jax.tree.leaves(want)


@pytest.mark.parametrize("name", [name for name in EVERY if "Parallel" not in name])  # those are a shard_map themselves
def test_lifted_transformations(name):
    """One program: a scan over two layers, in it remat, vmap over a batch, and the gradient; traced alone."""
    x = inputs(name)
    stack = nnx.vmap(lambda rngs: EVERY[name][0](rngs, backend="xla"))(nnx.Rngs(0).split(2))
    stack.eval()  # vmap takes no state that changes and has no axis, as of flax.nnx.BatchNorm

    @nnx.remat
    def one(layer, *x):
        return jax.tree.leaves(layer(*x))[0]

    @nnx.scan(in_axes=(nnx.Carry, 0))
    def run(total, layer):
        batched = nnx.vmap(one, in_axes=(None, 0, *(None for _ in x[1:])))
        return total + jnp.sum(batched(layer, jnp.stack([x[0]] * 3), *x[1:])), None

    def loss(stack):
        return run(jnp.float32(0), stack)[0]

    grads = nnx.eval_shape(lambda stack: nnx.jit(nnx.grad(loss))(stack), stack)
    wanted = nnx.state(stack, nnx.Param)
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(grads)) == jax.tree.map(jnp.shape, nnx.to_pure_dict(wanted))


@pytest.mark.parametrize("name", [name for name in EVERY if "Parallel" not in name])
def test_as_linens(name):
    """Each key makes parameters of its own, and what is applied is what was initialised: the NNX layer's result."""
    make, x = functools.partial(EVERY[name][0], backend="xla"), inputs(name)
    layer = nnx.bridge.to_linen(lambda *, rngs: make(rngs))
    init = jax.jit(layer.init)
    first, second, again = (init(jax.random.key(seed), *x) for seed in (0, 1, 0))
    same(first, again)
    differ = [np.abs(a - b).max() > 1e-2 for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True)]
    assert any(differ) != ("Ada" in name)  # whose modulation starts at zero
    module = made(name)
    nnx.update(module, nnx.State(second["params"]))
    same(jax.jit(layer.apply)(second, *x), nnx.jit(lambda layer, *x: layer(*x))(module, *x))
