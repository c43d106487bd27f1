"""The layers as Linen's, beside what tests/contracts/test_flax_tools.py has: parts that a layer makes itself, Linen's
own layers, and Linen's collections."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxops
from jaxops.nn import AdaLNZeroBlock, Fp8DotGeneral, Fp8Linear, MoE, Router
from tests.arrays import normal

pytestmark = pytest.mark.versions

T, D, C, B, E, F = 13, 8, 6, 4, 4, 12
OFFSETS = (0, 5, 5, 6, 11)  # one sequence is empty, the last two rows are in none


class Bare(nnx.Module):
    """A router of another kind."""

    def __init__(self, in_features: int, num_experts: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(in_features, num_experts, rngs=rngs)

    def __call__(self, x):
        return jaxops.route(self.linear(x), 1)


class Mixer(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, y, sequence_offsets=None):
        return self.linear(y)


INPUTS = normal(0, T, D), normal(1, B, C), jnp.array(OFFSETS, jnp.int32)
MADE = {
    "router-partial": (functools.partial(MoE, E, D, F, router=functools.partial(Router, k=2)), INPUTS[:1]),
    "router-class": (functools.partial(MoE, E, D, F, router=Bare), INPUTS[:1]),
    "block-class": (functools.partial(AdaLNZeroBlock, D, C, mixer=Mixer, mlp=Mixer), INPUTS),
    "block-partial": (
        functools.partial(AdaLNZeroBlock, D, C, mixer=functools.partial(Mixer), mlp=functools.partial(Mixer)),
        INPUTS,
    ),
}


@pytest.mark.parametrize(("make", "given"), MADE.values(), ids=MADE)
def test_parts_are_made_from_each_key(make, given):
    """And what is applied is what was initialised."""
    layer = nnx.bridge.to_linen(make.func, *make.args, **make.keywords)
    init = jax.jit(layer.init)
    first, second, again = (init(jax.random.key(seed), *given) for seed in (0, 1, 0))
    kernels = [nnx.traversals.flatten_mapping(variables["params"]) for variables in (first, second, again)]
    for path, kernel in kernels[0].items():
        np.testing.assert_array_equal(kernel, kernels[2][path])
        zero = path[-1] == "bias" or path[0] == "modulation"
        assert zero or np.abs(kernel - kernels[1][path]).max() > 1e-2, path

    def call(params, *given):
        module = make(rngs=nnx.Rngs(5))
        nnx.update(module, nnx.State(params))
        return module(*given)

    for got, want in zip(*(jax.tree.leaves(jax.jit(f)(v, *given)) for f, v in (
        (layer.apply, second), (call, second["params"])
    )), strict=True):  # fmt: skip
        np.testing.assert_array_equal(got, want)


def test_dot_general():
    """Linen's own layer, multiplied in FP8."""
    x, dense = normal(0, T, 160), linen.Dense(F, dot_general=Fp8DotGeneral())
    variables = jax.jit(dense.init)(jax.random.key(0), x)
    module = Fp8Linear(160, F, rngs=nnx.Rngs(0))
    nnx.update(module, nnx.State(variables["params"]))
    np.testing.assert_array_equal(jax.jit(dense.apply)(variables, x), nnx.jit(module)(x))


def test_history():
    """Linen's collection of the history has its type's name, and changes where it is mutable."""
    layer, x = nnx.bridge.to_linen(Fp8Linear, 160, F, recipe="delayed", history=2), jnp.full((T, 160), 3.0)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, variables["params"]) == {"kernel": (160, F), "bias": (F,)}
    y, changed = jax.jit(functools.partial(layer.apply, mutable=["AmaxHistory"]))(variables, x)
    np.testing.assert_array_equal(changed["AmaxHistory"]["amax_history"][0], [3, 0])
    want = x @ variables["params"]["kernel"]
    assert np.sqrt(np.mean((y - want) ** 2)) < 0.07 * np.sqrt(np.mean(want**2))
