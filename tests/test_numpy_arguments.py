"""Arrays of numpy, in gradients that are not under jit: as of JAX's own functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops

RNG = np.random.default_rng(0)
ROWS, MATRICES, BACK = (RNG.normal(size=size).astype(np.float32) for size in ((6, 4), (2, 4, 4), (2, 4, 4)))
VECTORS, OFFSETS = RNG.normal(size=(2, 4)).astype(np.float32), np.array([0, 2, 6], np.int32)

CALLS = {
    "grouped_matmul": lambda x: jaxops.grouped_matmul(x, MATRICES, OFFSETS, bias=VECTORS),
    "grouped_glu": lambda x: jaxops.grouped_glu(x, MATRICES, BACK, OFFSETS),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradient_without_jit(name):
    def loss(x):
        return jnp.sum(jnp.sin(CALLS[name](x)))

    np.testing.assert_allclose(jax.grad(loss)(ROWS), jax.jit(jax.grad(loss))(ROWS), rtol=1e-4, atol=1e-5)
