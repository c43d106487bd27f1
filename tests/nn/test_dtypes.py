"""The dtypes of results and gradients, as of Flax's own linear layer. Traced, not run."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.hopper import on_h200
from tests.jaxprs import equations
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


@pytest.mark.parametrize(("name", "options", "out"), [("MoE", {}, 4), ("SharedExperts", {"gated": True}, 1)])
def test_scores_are_no_tf32(name, options, out):
    """A GPU multiplies float32 in TF32 unless the product says HIGHEST: a router's logits, a gate's numbers and their
    gradients, as traced for one. A router's product with bfloat16 tokens: tests/ops/route/test_logits.py."""
    graphdef, params = nnx.split(make(name, backend="xla", dtype=jnp.bfloat16, **options))

    def loss(params, x):
        return sum(jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(nnx.merge(graphdef, params)(x)))

    with on_h200():
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, jnp.ones((25, 8))).jaxpr
    results = {tuple(sorted(shape)) for shape in ((out, 25), (out, 8), (8, 25))}  # in whichever order
    found = set()
    for product in (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"):
        shapes = [tuple(sorted(atom.aval.shape)) for atom in (*product.invars, *product.outvars)]
        if set(shapes) == results:
            found.add(shapes[-1])
            assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
            assert {atom.aval.dtype for atom in (*product.invars, *product.outvars)} == {jnp.dtype("float32")}
    assert found == results
