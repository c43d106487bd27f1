"""Names of residuals: how large they are, and one for functions that have none."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxops.offload import Policy, named, residual_bytes, scan

X, W = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.ones((5, 4, 4)) / 4


def test_bytes_by_name():
    def layer(x, w):
        return jnp.sin(
            checkpoint_name(jax.jit(lambda x: checkpoint_name(x @ w, "inside"))(x).astype(jnp.bfloat16), "half")
        ).astype(jnp.float32), None

    of = lambda scan: residual_bytes(lambda x: scan(layer, x, W)[0], jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert of(jax.lax.scan) == {"inside": 5 * 48, "half": 5 * 24}
    ours = of(lambda *args: scan(*args, policy=Policy(keep=("inside", "half", "carry"))))
    assert ours == {"carry": 5 * 48, "inside": 5 * 48, "half": 5 * 24}


def softmax_of_products(x, w, number):
    """With an integer, which has no gradient, and intermediates that cannot be named from outside."""
    return jax.nn.softmax(jnp.tanh(x @ w) @ w * number)


def test_everything_that_the_backward_needs():
    """With the name kept nothing of the function is recomputed, without it everything.

    In a loop, where XLA cannot reuse computed values.
    """

    def dots(policy):
        layer = lambda x, w: (named(softmax_of_products, "mine")(jnp.sin(x), w, 3) ** 2, None)
        f = lambda x, w: jnp.sum(scan(layer, x, w, policy=policy)[0])
        text = jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(X, W).compile().as_text()
        return sum(" dot(" in line or "__onednn$matmul" in line for line in text.splitlines())

    assert dots(Policy(keep=("mine",))) == 6
    assert dots(Policy()) == 8


def test_the_same_function():
    def gradients(f):
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(f(x, w, 3) ** 2), argnums=(0, 1)))(X, W[0])

    plain, ours = gradients(softmax_of_products), gradients(named(softmax_of_products, "mine"))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_goes_through_a_checkpoint_is_kept_once():
    """A `jax.checkpoint` inside a layer returns its inputs, weights too: those are not saved, others only once."""

    def layer(x, w):
        x = jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, w)
        return x + jnp.cos(x), None

    def kept(policy):
        closed = jax.make_jaxpr(lambda x, w: jax.vjp(lambda x, w: scan(layer, x, w, policy=policy)[0], x, w)[1])(X, W)
        return sorted((aval.shape, aval.memory_space.name) for aval in closed.out_avals if aval.ndim == 3)

    weights = ((5, 4, 4), "Device")
    assert kept(Policy(offload=("carry",))) == [weights, ((6, 3, 4), "Host")]
    assert kept(Policy(keep=("carry",))) == [((5, 3, 4), "Device"), weights]
