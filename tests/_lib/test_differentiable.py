"""Gradients of ops whose operands are pytrees with integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops._lib.arrays.differentiable import differentiable_as

pytestmark = pytest.mark.versions

OPERANDS = jnp.array([0.5, 1.5]), {"power": jnp.array([2, 3]), "factor": jnp.array([3.0, 4.0]), "none": None}


def plain(scale: float, x, rest):
    return scale * rest["factor"] * x ** rest["power"]


def test_gradients_of_another_function():
    """Of any order, for all floats of a pytree; its integers have none."""
    op = differentiable_as(lambda *args: jax.lax.stop_gradient(plain(*args)), plain, static=1)
    x, rest = OPERANDS
    np.testing.assert_array_equal(op(2.0, x, rest), plain(2.0, x, rest))

    def total(f, x, factor):
        return jnp.sum(jnp.sin(f(2.0, x, rest | {"factor": factor})))

    for order in (jax.grad, lambda f, argnums: jax.grad(lambda *a: jnp.sum(jax.grad(f)(*a) ** 2), argnums)):
        got, want = (order(lambda x, y, f=f: total(f, x, y), (0, 1))(x, rest["factor"]) for f in (op, plain))
        np.testing.assert_allclose(got, want, rtol=1e-5)
