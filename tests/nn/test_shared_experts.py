"""SharedExperts beside plain products in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops.nn import SharedExperts
from tests.arrays import normal
from tests.compare import assert_close

# More columns than a block of 128 has.
T, D, F = 36, 136, 150


def make(recipe: str | None = None, **options) -> SharedExperts:
    how = {"gated": True, "precision": "highest" if recipe is None else None} | options
    return SharedExperts(D, F, recipe=recipe, **how, rngs=nnx.Rngs(0))


X, DOUT = normal(1, T, D), normal(2, T, D)


def of(module: SharedExperts):
    """(the layer as a function of its parameters and x, the parameters)"""
    graphdef, params = nnx.split(module)
    return lambda params, x: nnx.merge(graphdef, params)(x), params


def gate_tokens(y: jax.Array, params: nnx.State, x: jax.Array) -> jax.Array:
    return y * jax.nn.sigmoid(jnp.matmul(x, params["token_gate"][...], precision="highest"))


def plain(params: nnx.State, x: jax.Array, activation=jax.nn.silu) -> jax.Array:
    gate, up, down = (params[name][...] for name in ("gate", "up", "down"))
    with jax.default_matmul_precision("highest"):
        y = (activation(x @ gate) * (x @ up)) @ down
    return gate_tokens(y, params, x) if "token_gate" in params else y


def result_and_gradients(f, params: nnx.State, x: jax.Array):
    """(result, gradients of the parameters and of x)"""
    grads, y = jax.jit(jax.grad(lambda *a: (jnp.sum((y := f(*a)) * DOUT), y), argnums=(0, 1), has_aux=True))(params, x)
    return y, *grads


@functools.cache
def in_float32():
    """Of a gated layer, whose parameters are the same with every recipe."""
    return result_and_gradients(plain, of(make())[1], X)


def errors(got, want) -> dict[str, float]:
    """RMS error over RMS of each array, by its path."""
    rms = lambda array: float(np.sqrt(np.mean(np.asarray(array, np.float64) ** 2)))
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
    return {jax.tree_util.keystr(path): rms(ours - wanted) / rms(wanted) for (path, ours), wanted in pairs}


def test_without_gate():
    """With one: tests/contracts."""
    layer, params = of(make(gated=False, activation="relu"))
    assert "token_gate" not in params
    got = result_and_gradients(layer, params, X)
    want = result_and_gradients(functools.partial(plain, activation=jax.nn.relu), params, X)
    for (path, ours), wanted in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_close(ours, wanted, "float32", jax.tree_util.keystr(path), scale=5)


def test_fp8():
    """Within the error of FP8 from float32, where it would be 1e-6. pow2_scales changes the numbers."""
    (layer, params), (other, _) = (of(make("rowwise", pow2_scales=pow2)) for pow2 in (True, False))
    got = result_and_gradients(layer, params, X)
    assert (jax.jit(other)(params, X) != got[0]).any()
    for name, error in errors(got, in_float32()).items():
        assert 0.002 < error < 0.12, (name, error)


def test_leading_axes_and_no_tokens():
    layer = nnx.jit(make())
    np.testing.assert_array_equal(layer(X.reshape(2, 18, D)).reshape(T, D), layer(X))
    assert layer(X[:0]).shape == (0, D)
    with pytest.raises(ValueError, match=r"x has shape \(36, 9\); it must be \[\.\.\., in_features=136\]"):
        make()(X[:, :9])


def test_bfloat16():
    """bfloat16 products of float32 parameters, whose gradients are not rounded to bfloat16."""
    layer, params = of(make(dtype=jnp.bfloat16, precision=None))
    y, dparams, _ = result_and_gradients(layer, params, X)
    assert_close(y, in_float32()[0], "bfloat16", scale=2)
    for name, gradient in nnx.to_pure_dict(dparams).items():
        assert (gradient != gradient.astype(jnp.bfloat16)).any(), name


def test_initial_values():
    """lecun_normal, of keys of their own; a layer with a recipe has the same."""
    params, in_fp8 = (nnx.to_pure_dict(nnx.state(make(recipe))) for recipe in (None, "tensorwise"))
    jax.tree.map(np.testing.assert_array_equal, params, in_fp8)
    for name, fan_in in (("gate", D), ("up", D), ("down", F)):
        assert jnp.std(params[name]) == pytest.approx(fan_in**-0.5, rel=0.05)
    assert (params["gate"] != params["up"]).any()
