"""GroupedLinear against one linear layer a group, and its manners as a Flax module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops.nn import GroupedLinear
from tests.compare import assert_close

G, M, IN, OUT = 4, 13, 8, 6
OFFSETS = (0, 5, 5, 6, 11)  # group 1 is empty, the last two rows are in no group


def layer(**options) -> GroupedLinear:
    return GroupedLinear(G, IN, OUT, bias_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0), **options)


def rows(dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (M, IN), dtype)


def offsets() -> jax.Array:
    return jnp.array(OFFSETS, jnp.int32)


def one_linear_a_group(module: GroupedLinear, x: jax.Array) -> jax.Array:
    parts = []
    for g in range(G):
        linear = nnx.Linear(IN, OUT, use_bias=module.use_bias, dtype=jnp.float32, precision="highest", rngs=nnx.Rngs(0))
        linear.kernel[...] = module.kernel[g]
        if module.bias is not None:
            linear.bias[...] = module.bias[g]
        parts.append(linear(x[OFFSETS[g] : OFFSETS[g + 1]]))
    return jnp.concatenate([*parts, jnp.zeros((M - OFFSETS[-1], OUT))])


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("backend", ["auto", "pallas"])
def test_values(use_bias, backend):
    module = layer(use_bias=use_bias, backend=backend, precision="highest")
    assert (module.bias is not None) == use_bias
    assert_close(module(rows(), offsets()), one_linear_a_group(module, rows()), "float32")


@pytest.mark.parametrize(
    ("x_dtype", "dtype", "param_dtype", "out"),
    [
        (jnp.bfloat16, None, jnp.float32, jnp.float32),
        (jnp.bfloat16, None, jnp.bfloat16, jnp.bfloat16),
        (jnp.float32, jnp.bfloat16, jnp.float32, jnp.bfloat16),
        (jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.float32),
    ],
)
def test_dtypes_follow_flax(x_dtype, dtype, param_dtype, out):
    x = rows(x_dtype)
    ours = layer(dtype=dtype, param_dtype=param_dtype)
    assert ours(x, offsets()).dtype == nnx.Linear(IN, OUT, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))(x).dtype == out
    assert_close(ours(x, offsets()), one_linear_a_group(layer(param_dtype=param_dtype), x.astype(jnp.float32)), "bfloat16")


def test_float32_parameters_get_unrounded_gradients():
    module, cotangent = layer(dtype=jnp.bfloat16), jax.random.normal(jax.random.key(2), (M, OUT)).astype(jnp.bfloat16).astype(jnp.float32)
    grads = nnx.grad(lambda module: jnp.sum(module(rows(jnp.bfloat16), offsets()).astype(jnp.float32) * cotangent))(module)
    x = rows(jnp.bfloat16).astype(jnp.float32)
    want = jnp.stack([jnp.matmul(x[a:b].T, cotangent[a:b], precision="highest") for a, b in zip(OFFSETS, OFFSETS[1:], strict=False)])
    assert grads.kernel[...].dtype == grads.bias[...].dtype == jnp.float32
    assert_close(grads.kernel[...], want, "float32", "kernel")  # in bfloat16 it would be past this limit
    assert_close(grads.bias[...], jnp.stack([cotangent[a:b].sum(0) for a, b in zip(OFFSETS, OFFSETS[1:], strict=False)]), "float32", "bias")


@pytest.mark.parametrize("num_groups", [1, 64])
def test_fan_in_is_one_group(num_groups):
    module = GroupedLinear(num_groups, 128, 64, rngs=nnx.Rngs(0))
    assert jnp.std(module.kernel[...]) == pytest.approx(128**-0.5, rel=0.05)
    assert not module.bias[...].any()


def test_jit_split_merge():
    module = layer()
    graphdef, state = nnx.split(module)
    again = jax.jit(lambda state, x, offsets: nnx.merge(graphdef, state)(x, offsets))
    want = module(rows(), offsets())
    assert_close(again(state, rows(), offsets()), want, "float32")
    again(state, rows(), jnp.array([0, 1, 2, 3, 4], jnp.int32))
    assert again._cache_size() == 1, "new offsets recompiled"
    assert_close(nnx.jit(lambda module, x, offsets: module(x, offsets))(module, rows(), offsets()), want, "float32")


def test_to_linen():
    linen = nnx.bridge.to_linen(GroupedLinear, G, IN, OUT)
    variables = linen.init(jax.random.key(0), rows(), offsets())
    assert jax.tree.map(jnp.shape, variables["params"]) == {"kernel": (G, IN, OUT), "bias": (G, OUT)}
    module = layer()
    module.kernel[...], module.bias[...] = variables["params"]["kernel"], variables["params"]["bias"]
    np.testing.assert_array_equal(linen.apply(variables, rows(), offsets()), module(rows(), offsets()))


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


def test_wrong_dtypes():
    with pytest.raises(TypeError, match="group_offsets"):
        layer()(rows(), offsets().astype(jnp.float32))
    with pytest.raises(TypeError, match="lhs"):
        layer()(jnp.ones((M, IN), jnp.int32), offsets())


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend"):
        layer(backend="cublas")(rows(), offsets())
