"""The dtypes of results and gradients, as of Flax's own linear layer. Traced, not run."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.nn.test_arguments import CALLS, make

ONE, SEQUENCE = jnp.ones((1, 4)), jnp.array([0, 2], jnp.int32)
ADALN = {
    "AdaLayerNorm": lambda layer, x: layer(x, ONE.astype(x.dtype), SEQUENCE),
    "AdaRMSNorm": lambda layer, x: layer(x, ONE.astype(x.dtype), SEQUENCE),
}
LAYERS = {name: call for name, call in CALLS.items() if name != "Router"} | ADALN


@pytest.mark.parametrize(
    ("x_dtype", "dtype", "param_dtype", "out"),
    [
        (jnp.bfloat16, None, jnp.float32, jnp.float32),
        (jnp.bfloat16, None, jnp.bfloat16, jnp.bfloat16),
        (jnp.float32, jnp.bfloat16, jnp.float32, jnp.bfloat16),
        (jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.float32),
    ],
)
@pytest.mark.parametrize("recipe", [None, "blockwise"])
@pytest.mark.parametrize("name", LAYERS)
def test_dtypes_follow_flax(name, recipe, x_dtype, dtype, param_dtype, out):
    options = {"dtype": dtype, "param_dtype": param_dtype}
    if name in ("GroupedLinear", "MoE", "SharedExperts"):
        options["recipe"] = recipe
    elif (name == "Fp8Linear") != (recipe is not None):
        pytest.skip("it has no such recipe")
    x = jax.ShapeDtypeStruct((2, 8), x_dtype)
    flax = nnx.eval_shape(lambda x: nnx.Linear(8, 8, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))(x), x)
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: make(name, **options)), nnx.Param, ...)

    def result(params, x):
        return jax.tree.leaves(LAYERS[name](nnx.merge(graphdef, params, rest), x))[0]

    assert jax.eval_shape(result, params, x).dtype == flax.dtype == out
    grads = jax.eval_shape(jax.grad(lambda params, x: jnp.sum(result(params, x).astype(jnp.float32))), params, x)
    assert jax.tree.map(lambda g: (g.shape, g.dtype), grads) == jax.tree.map(lambda p: (p.shape, p.dtype), params)
    own = {path[0].key: leaf.dtype for path, leaf in jax.tree.leaves_with_path(grads)}
    assert {own[key] for key in own if key != "router"} == {jnp.dtype(param_dtype)}
