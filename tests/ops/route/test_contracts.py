"""The contracts of every op: transformations, determinism, no host work, no recompilation."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from tests.compare import assert_close
from tests.ops.route.cases import DEEPSEEK, apply, make_case

VARIANT = DEEPSEEK
CASE = make_case(VARIANT)


def test_a_routing_is_a_pytree():
    """Through jit, with its fields by name."""
    routing = jax.jit(lambda logits: apply(VARIANT, "xla", logits, CASE["selection_bias"]))(CASE["logits"])
    assert isinstance(routing, jaxops.Routing)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, routing)
    np.testing.assert_array_equal(doubled.load, 2 * np.asarray(routing.load))
    assert [path[0].name for path, _ in jax.tree.leaves_with_path(routing)] == list(vars(routing))


def test_feeds_a_grouped_product():
    """Experts after the router, and the sum with the router's weights: the same as each token's experts one by one."""
    x, w = (
        np.random.default_rng(seed).normal(size=size).astype(np.float32)
        for seed, size in enumerate(((VARIANT.T, 4), (VARIANT.E, 4, 5)))
    )

    @jax.jit
    def layer(x, w):
        routing = apply(VARIANT, "xla", CASE["logits"], CASE["selection_bias"])
        rows = jaxops.grouped_matmul(x[routing.row_indices], w, routing.group_offsets)
        gathered = jnp.take(rows, routing.row_positions, axis=0, mode="fill", fill_value=0)
        return jnp.einsum("tkd,tk->td", gathered, routing.weights), routing

    got, routing = layer(x, w)
    weights, experts = np.asarray(routing.weights), np.asarray(routing.experts)
    want = np.stack([sum(weights[t, j] * x[t] @ w[experts[t, j]] for j in range(VARIANT.k)) for t in range(VARIANT.T)])
    assert_close(got, want, "float32")
