"""Stochastic rounding: the same bits everywhere, between the right neighbours, right on average."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.numerics.fp8 import cast_stochastic, random_bits
from tests.ops.quantize.cases import E4M3, E5M2, KEY, RUNS, Variant, bits_of, check_equal, compiled, make_x, np_quantize


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "variant", [Variant(stochastic=True), Variant("tensorwise", "row", E5M2, pow2=True, stochastic=True)], ids=str
)
def test_values(run, variant):
    x = make_x((150, 261), "float32", seed=9)
    check_equal(compiled(run, variant)(x), np_quantize(x, variant), variant)


@pytest.mark.parametrize("run", RUNS)
def test_matrices_of_a_stack_round_differently(run):
    """By the rows of all, one below another: equal matrices are not rounded alike."""
    variant = Variant("rowwise", stochastic=True)
    x = make_x((8, 120), "float32", seed=4)
    want = np_quantize(np.concatenate([x, x, x]), dataclasses.replace(variant, layouts="row"))
    q = compiled(run, variant)(jnp.stack([x, x, x]))
    np.testing.assert_array_equal(bits_of(q.values).reshape(24, 120), bits_of(want["values"]))
    assert (bits_of(q.values[0]) != bits_of(q.values[1])).mean() > 0.1
    assert (bits_of(q.values_t[0]) != bits_of(q.values_t[1])).mean() > 0.1


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_neighbours_and_mean(dtype):
    """A number becomes one of its neighbours, with the right frequency: normal, subnormal, tiny and exact ones."""
    least = float(jnp.finfo(dtype).smallest_subnormal)
    numbers = np.array(
        [
            1.0,
            1.03,
            -1.1,
            3.3,
            100.7,
            447.0 if dtype == E4M3 else 57000.0,
            0.3 * least,
            -1.75 * least,
            5.01 * least,
            0.01 * least,
            0.0,
        ],
        np.float32,
    )
    n = 40_000
    words = tuple(jnp.int32(w) for w in (123456789, -987654321))
    bits = random_bits(
        jnp.arange(len(numbers), dtype=jnp.int32)[:, None], jnp.arange(n, dtype=jnp.int32)[None, :], words
    )
    got = np.asarray(
        jax.jit(lambda v, b: cast_stochastic(v, dtype, b))(jnp.broadcast_to(numbers[:, None], bits.shape), bits),
        np.float64,
    )
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
    x = np.asarray(draw(jnp.int32(1), jnp.int32(2))).view(np.uint32) >> 12  # what the casts use
    n = x.size
    counts = np.bincount((x >> 12).ravel(), minlength=256)
    assert np.sum((counts - n / 256) ** 2) / (n / 256) < 255 + 6 * np.sqrt(2 * 255)  # chi square
    u = x / 2**20 - 0.5
    others = [u[:, 1:] * u[:, :-1], u[1:] * u[:-1], u[1:, 1:] * u[:-1, :-1], u[:128] * u[128:]]
    others += [
        u * (np.asarray(draw(*key)).view(np.uint32) / 2**32 - 0.5)
        for key in ((jnp.int32(1), jnp.int32(3)), (jnp.int32(2), jnp.int32(2)))
    ]
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
