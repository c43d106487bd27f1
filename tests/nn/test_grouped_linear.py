"""GroupedLinear beside what tests/contracts has: without bias, unrounded gradients, initial values, errors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops.nn import GroupedLinear
from tests.arrays import put
from tests.compare import assert_close
from tests.contracts.entry import reference

pytestmark = pytest.mark.versions

G, M, IN, OUT = 4, 13, 8, 6
OFFSETS = (0, 5, 5, 6, 11)  # group 1 is empty, the last two rows are in no group


# Compiled whole: operation by operation, JAX would compile every one of them.
apply = nnx.jit(lambda module, x, offsets: module(x, offsets))


def numbers(key, shape, dtype) -> jax.Array:
    return put(np.random.default_rng(len(shape)).normal(size=shape), dtype)


def layer(**options) -> GroupedLinear:
    return GroupedLinear(G, IN, OUT, kernel_init=numbers, bias_init=numbers, rngs=nnx.Rngs(0), **options)


def rows(dtype=jnp.float32) -> jax.Array:
    return numbers(None, (M, IN), dtype)


def offsets() -> jax.Array:
    return jnp.array(OFFSETS, jnp.int32)


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def test_without_bias():
    module = layer(use_bias=False, precision="highest")
    assert module.bias is None
    want = reference("grouped_matmul", lhs=rows(), rhs=module.kernel[...], group_offsets=offsets())
    assert_close(apply(module, rows(), offsets()), want, "float32")


def test_float32_parameters_get_unrounded_gradients():
    module, x, cotangent = layer(dtype=jnp.bfloat16), rows(jnp.bfloat16), numbers(None, (M, OUT), jnp.bfloat16)
    grads = nnx.jit(
        nnx.grad(
            lambda module, x, offsets: jnp.sum(module(x, offsets).astype(jnp.float32) * cotangent.astype(jnp.float32))
        )
    )(module, x, offsets())
    groups = [slice(start, end) for start, end in itertools.pairwise(OFFSETS)]
    assert grads.kernel[...].dtype == grads.bias[...].dtype == jnp.float32
    # A gradient rounded to bfloat16 would be past these limits.
    assert_close(
        grads.kernel[...], np.stack([wide(x)[rows].T @ wide(cotangent)[rows] for rows in groups]), "float32", "kernel"
    )
    assert_close(grads.bias[...], np.stack([wide(cotangent)[rows].sum(axis=0) for rows in groups]), "float32", "bias")


@pytest.mark.parametrize("num_groups", [1, 64])
def test_fan_in_is_one_group(num_groups):
    module = GroupedLinear(num_groups, 128, 64, rngs=nnx.Rngs(0))
    assert jnp.std(module.kernel[...]) == pytest.approx(128**-0.5, rel=0.05)
    assert not module.bias[...].any()


@pytest.mark.parametrize(
    ("x", "group_offsets", "error", "says"),
    [
        ((M, IN + 1), (G + 1,), ValueError, r"x has shape \(13, 9\); it must be \[M, in_features=8\]"),
        ((2, M, IN), (G + 1,), ValueError, r"x has shape \(2, 13, 8\).* flatten"),
        ((M, IN), (G,), ValueError, r"group_offsets has shape \(4,\); it must be \[num_groups \+ 1\] = \(5,\)"),
    ],
)
def test_wrong_shapes(x, group_offsets, error, says):
    with pytest.raises(error, match=says):
        layer()(jnp.ones(x), jnp.zeros(group_offsets, jnp.int32))
