"""The activations against float64 arithmetic written out here."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops._lib.numerics.activations import (
    ACTIVATIONS,
    UNITS,
    activate,
    activate_and_slope,
    activation_name,
    quick_sigmoid,
    unit,
    unit_gradients,
)

NEAR = np.linspace(-12, 12, 4001)
U = np.concatenate([NEAR, [-600.0, -200.0, 200.0, 600.0]])  # exponentials overflow and vanish
ROOT = math.sqrt(2 / math.pi)


def logistic(u: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-u))


def slope_of(value, u: np.ndarray) -> np.ndarray:
    return (value(u + 1e-5) - value(u - 1e-5)) / 2e-5


WANTED = {
    "silu": lambda u: u * logistic(u),
    "gelu": lambda u: u * np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in u]),
    "gelu_tanh": lambda u: 0.5 * u * (1 + np.tanh(ROOT * (u + 0.044715 * u**3))),
    "relu": lambda u: np.maximum(u, 0),
    "relu2": lambda u: np.maximum(u, 0) ** 2,
    "sigmoid": logistic,
}


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", WANTED)
def test_values_and_slopes(name, x64):
    assert set(WANTED) == set(ACTIVATIONS)
    u = U[U != 0].astype(np.float32)  # relu has no slope at 0
    with jax.enable_x64(x64):
        value, slope = jax.jit(activate_and_slope, static_argnums=1)(u, name)
        exact, exact_slope = (
            jax.jit(f)(u) for f in (lambda u: activate(u, name), jax.vmap(jax.grad(lambda u: activate(u, name))))
        )
    assert {x.dtype for x in (value, slope, exact, exact_slope)} == {jnp.dtype("float32")}
    wide = u.astype(np.float64)
    for got in (value, exact):
        np.testing.assert_allclose(got, WANTED[name](wide), atol=5e-7, rtol=2e-7)
    for got in (slope, exact_slope):
        np.testing.assert_allclose(got, slope_of(WANTED[name], wide), atol=3e-6, rtol=1e-8)  # the quotient's rounding


@pytest.mark.parametrize("x64", [False, True])
def test_unit_of_gpt_oss(x64):
    """As transformers' GptOssExperts: clamped, no gradient where it is; at the bounds themselves the inner one, as
    torch.clamp's."""
    rng = np.random.default_rng(0)
    bounds = np.array([7, -7, 7, 3, np.nextafter(np.float32(7), np.float32(9)), 200, -200, 7], np.float32)
    gate, up = (np.concatenate([5 * rng.normal(size=500), x]).astype(np.float32) for x in (bounds, bounds[::-1]))
    dh = rng.normal(size=gate.shape).astype(np.float32)
    g, u = np.minimum(gate.astype(np.float64), 7), np.clip(up.astype(np.float64), -7, 7)
    value, slope = g * logistic(1.702 * g), logistic(1.702 * g) * (1 + 1.702 * g * (1 - logistic(1.702 * g)))
    with jax.enable_x64(x64):
        h, (dgate, dup) = unit("swiglu_oai", gate, up), unit_gradients("swiglu_oai", gate, up, dh)
        _, vjp = jax.vjp(lambda *given: unit("swiglu_oai", *given), jnp.asarray(gate), jnp.asarray(up))
        by_jax = vjp(jnp.asarray(dh))
    assert {x.dtype for x in (h, dgate, dup)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(h, value * (u + 1), rtol=1e-6, atol=1e-6)
    for of_gate, of_up in ((dgate, dup), by_jax):
        np.testing.assert_allclose(of_gate, np.where(gate > 7, 0, dh * (u + 1) * slope), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(of_up, np.where(np.abs(up) > 7, 0, dh * value), rtol=1e-5, atol=1e-5)
    assert np.isnan(unit("swiglu_oai", jnp.full(2, jnp.nan), jnp.ones(2))).all()
    assert np.isnan(unit("swiglu_oai", jnp.ones(2), jnp.full(2, jnp.nan))).all()


def test_quick_sigmoid():
    u = np.concatenate([np.linspace(-87, 100, 40001), NEAR]).astype(np.float32)
    want = logistic(u.astype(np.float64))
    error = np.abs(np.asarray(jax.jit(quick_sigmoid)(u), np.float64) / want - 1)
    assert np.max(error - 8e-8 * np.abs(u)) < 6e-7
    ends = np.array([-np.inf, -1e4, -104, 104, 1e4, np.inf, np.nan], np.float32)
    np.testing.assert_allclose(quick_sigmoid(ends), [0, 0, 0, 1, 1, 1, np.nan], atol=1e-37)
    for name in ("silu", "gelu_tanh", "sigmoid"):
        for quick, plain in zip(
            *(activate_and_slope(NEAR, name, s) for s in (quick_sigmoid, jax.nn.sigmoid)), strict=True
        ):
            np.testing.assert_allclose(quick, plain, atol=4e-6, rtol=0)


@pytest.mark.parametrize("name", WANTED)
def test_nan_stays_nan(name):
    assert np.isnan(activate(jnp.full(3, jnp.nan), name)).all()


def test_names_of_other_libraries():
    """Configurations' names, and functions by identity; a partial gelu says which it is."""
    approximate = lambda value: functools.partial(jax.nn.gelu, approximate=value)
    given = ["swish", jax.nn.silu, jax.nn.swish, nnx.silu, "gelu_pytorch_tanh", jax.nn.gelu, approximate(True)]
    given += [approximate(False), jax.nn.relu, "relu2", jax.nn.sigmoid]
    assert [activation_name(each) for each in given] == (
        ["silu"] * 4 + ["gelu_tanh"] * 3 + ["gelu", "relu", "relu2", "sigmoid"]
    )
    assert [activation_name(name) for name in ACTIVATIONS] == list(ACTIVATIONS)
    assert [activation_name(name, unit=True) for name in (*UNITS, "swigluoai")] == [*UNITS, "swiglu_oai"]


def test_unknown_activations():
    """Also a unit of two, and functions that are bound to arguments in another way."""
    bound = [functools.partial(jax.nn.silu), functools.partial(jax.nn.gelu, False)]
    bound.append(functools.partial(jax.nn.gelu, approximate=jnp.ones(1)))
    for unknown in ("tanh", "swiglu_oai", jax.nn.relu6, None, 3, [], *bound):
        with pytest.raises(ValueError, match=r"activation=.*: write 'silu', 'gelu', 'gelu_tanh', 'relu', 'relu2', "):
            activation_name(unknown)
