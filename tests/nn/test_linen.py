"""The layers as Linen's: each key makes parameters of its own, and what is applied is what was initialised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxops
from jaxops.nn import (
    AdaLNZeroBlock,
    Fp8DotGeneral,
    Fp8Linear,
    MoE,
    Router,
)
from tests.arrays import put

pytestmark = pytest.mark.versions

T, D, C, B, E, F, K = 13, 8, 6, 4, 4, 12, 2
OFFSETS = (0, 5, 5, 6, 11)  # one sequence or group is empty, the last two rows are in none


def normal(seed: int, *shape: int) -> jax.Array:
    return put(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal(0, T, D), normal(1, B, C), jnp.array(OFFSETS, jnp.int32)


def modulation_init(key, shape, dtype) -> jax.Array:
    return normal(7, *shape).astype(dtype) / 2


def result_of_nnx(make, variables, *args):
    """Of the NNX layer that has these parameters."""

    def call(params, *args):
        module = make(rngs=nnx.Rngs(5))
        nnx.update(module, nnx.State(params))
        return module(*args)

    return jax.jit(call)(variables["params"], *args)


class Bare(nnx.Module):
    """A router of another kind."""

    def __init__(self, in_features: int, num_experts: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(in_features, num_experts, rngs=rngs)

    def __call__(self, x):
        return jaxops.route(self.linear(x), 1)


ROUTERS = {"partial": (functools.partial(Router, k=K, use_bias=True), K), "class": (Bare, 1)}


@pytest.mark.parametrize(("router", "k"), ROUTERS.values(), ids=ROUTERS)
def test_moe(router, k):
    make = functools.partial(MoE, E, D, F, router=router)
    layer, x = nnx.bridge.to_linen(MoE, E, D, F, router=router), normal(0, T, D)
    init = jax.jit(layer.init)
    first, second, again = (init(jax.random.key(seed), x) for seed in (0, 1, 0))
    kernels = [nnx.traversals.flatten_mapping(variables["params"]["router"]) for variables in (first, second, again)]
    for path, kernel in kernels[0].items():
        np.testing.assert_array_equal(kernel, kernels[2][path])
        assert path[-1] == "bias" or np.abs(kernel - kernels[1][path]).max() > 1e-2, path
    y, routing = jax.jit(layer.apply)(second, x)
    assert routing.experts.shape == (T, k)
    np.testing.assert_array_equal(y, result_of_nnx(make, second, x)[0])


class Mixer(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, y, sequence_offsets):
        return self.linear(y)


class Mlp(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.inside = nnx.Sequential(nnx.Linear(D, 2 * D, rngs=rngs), jax.nn.gelu, nnx.Linear(2 * D, D, rngs=rngs))

    def __call__(self, y):
        return self.inside(y)


OPTIONS = {"modulation_init": modulation_init, "epsilon": (1e-6, 1e-5)}
PARTS = {
    "class": {"mixer": Mixer, "mlp": Mlp},
    "partial": {"mixer": functools.partial(Mixer), "mlp": functools.partial(Mlp)},
}
BLOCKS = {name: nnx.bridge.to_linen(AdaLNZeroBlock, D, C, **parts, **OPTIONS) for name, parts in PARTS.items()}


@pytest.mark.parametrize("layer", BLOCKS.values(), ids=BLOCKS)
def test_blocks(layer):
    x = inputs()[0]
    init = jax.jit(layer.init)
    first, second = (init(jax.random.key(seed), *inputs())["params"] for seed in (0, 1))
    assert set(first) == {"modulation", "mixer", "mlp"}
    for part in ("mixer", "mlp"):
        kernels = [nnx.traversals.flatten_mapping(params[part]) for params in (first, second)]
        for path in kernels[0]:
            assert path[-1] == "bias" or np.abs(kernels[0][path] - kernels[1][path]).max() > 1e-2, path
    y = jax.jit(layer.apply)({"params": second}, *inputs())
    np.testing.assert_array_equal(y[-2:], x[-2:], err_msg="rows outside")
    assert np.abs(y - x)[: OFFSETS[-1]].max() > 1e-2


def test_dot_general():
    """Linen's own layer, multiplied in FP8."""
    x, dense = normal(0, T, 160), linen.Dense(F, dot_general=Fp8DotGeneral())
    variables = jax.jit(dense.init)(jax.random.key(0), x)
    got = jax.jit(dense.apply)(variables, x)
    np.testing.assert_array_equal(got, result_of_nnx(functools.partial(Fp8Linear, 160, F), variables, x))


def test_history():
    """Linen's collection of the history has its type's name, and changes where it is mutable."""
    layer, x = nnx.bridge.to_linen(Fp8Linear, 160, F, recipe="delayed", history=2), jnp.full((T, 160), 3.0)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, variables["params"]) == {"kernel": (160, F), "bias": (F,)}
    y, changed = jax.jit(functools.partial(layer.apply, mutable=["AmaxHistory"]))(variables, x)
    np.testing.assert_array_equal(changed["AmaxHistory"]["amax_history"][0], [3, 0])
    want = x @ variables["params"]["kernel"]
    assert np.sqrt(np.mean((y - want) ** 2)) < 0.07 * np.sqrt(np.mean(want**2))
