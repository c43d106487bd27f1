"""Stochastic rounding: between the right neighbours, right on average, by bits that are random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.numerics.fp8 import cast_stochastic, random_bits
from tests.ops.quantize.cases import E4M3, E5M2, KEY, bits_of


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_neighbours_and_mean(dtype):
    """A number becomes one of its neighbours, with the right frequency: normal, subnormal, tiny and exact ones."""
    least = float(jnp.finfo(dtype).smallest_subnormal)
    large = [1.0, 1.03, -1.1, 3.3, 100.7, 447.0 if dtype == E4M3 else 57000.0]
    numbers = np.array([*large, *(n * least for n in (0.3, -1.75, 5.01, 0.01, 0.0))], np.float32)
    n = 40_000
    words = tuple(jnp.int32(w) for w in (123456789, -987654321))
    row, column = jnp.arange(len(numbers), dtype=jnp.int32)[:, None], jnp.arange(n, dtype=jnp.int32)[None, :]
    bits = random_bits(row, column, words)
    cast = jax.jit(lambda v, b: cast_stochastic(v, dtype, b))
    got = np.asarray(cast(jnp.broadcast_to(numbers[:, None], bits.shape), bits), np.float64)
    grid = np.unique(np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float64))
    grid = grid[np.isfinite(grid)]
    for number, found in zip(numbers.astype(np.float64), got, strict=True):
        low, high = grid[grid <= number].max(), grid[grid >= number].min()
        assert set(np.unique(found)) <= {low, high}, number
        p = 0.0 if high == low else (number - low) / (high - low)
        assert abs(np.mean(found == high) - p) < 5 * np.sqrt(p * (1 - p) / n) + 1e-6 or high == low, number


def test_bits_are_random():
    """Uniform, and no row, column, bit or key is like another."""
    rows, columns = jnp.arange(256, dtype=jnp.int32)[:, None], jnp.arange(512, dtype=jnp.int32)[None, :]
    draw = jax.jit(lambda a, b: random_bits(rows, columns, (a, b)))
    numbers = lambda *key: np.asarray(draw(*map(jnp.int32, key))).view(np.uint32)
    x = numbers(1, 2) >> 12  # what the casts use
    n = x.size
    counts = np.bincount((x >> 12).ravel(), minlength=256)
    assert np.sum((counts - n / 256) ** 2) / (n / 256) < 255 + 6 * np.sqrt(2 * 255)  # chi square
    u = x / 2**20 - 0.5
    others = [u[:, 1:] * u[:, :-1], u[1:] * u[:-1], u[1:, 1:] * u[:-1, :-1], u[:128] * u[128:]]
    others += [u * (numbers(*key) / 2**32 - 0.5) for key in ((1, 3), (2, 2))]
    for product in others:
        assert abs(product.mean()) < 5 / 12 / np.sqrt(product.size)
    # Two corners minus the other two: zero if an element's hash were a sum of its row's and its column's.
    corners = u[1:, 1:] - u[1:, :-1] - u[:-1, 1:] + u[:-1, :-1]
    np.testing.assert_allclose(np.var(corners), 4 / 12, rtol=0.03)


def test_keys():
    """New ones and old ones, and what is none."""
    x = jax.random.normal(jax.random.key(0), (8, 130))
    quantize = jax.jit(lambda x, *keys: [jaxops.quantize(x, key=key).values for key in keys])
    a, b, c = map(bits_of, quantize(x, KEY, jax.random.key_data(KEY), jax.random.key(8)))
    np.testing.assert_array_equal(a, b)
    assert (c != a).mean() > 0.1
    with pytest.raises(TypeError):
        jaxops.quantize(x, key=jnp.ones(2))
