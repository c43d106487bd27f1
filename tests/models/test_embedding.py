"""`models.embedding.look_up`: values and gradients, summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.embedding import look_up
from tests.arrays import put


@pytest.mark.parametrize(("vocab", "tokens"), [(300, 517), (128, 64), (1, 7), (131, 1), (5, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients(vocab, tokens, dtype):
    rng = np.random.default_rng(0)
    table = put(rng.normal(size=(vocab, 24)), jnp.float32)
    words = put(rng.zipf(1.3, (1, tokens)) % vocab, jnp.int32)
    dout = put(rng.normal(size=(1, tokens, 24)), dtype)

    @jax.jit
    def both(table, dout):
        out, vjp = jax.vjp(lambda table: look_up(table, words, dtype, "auto"), table)
        return out, *vjp(dout)

    out, grad = both(table, dout)
    np.testing.assert_array_equal(out, np.asarray(table)[np.asarray(words)].astype(dtype))
    wanted = np.zeros((vocab, 24))
    np.add.at(wanted, np.asarray(words).ravel(), np.asarray(dout, np.float64).reshape(-1, 24))
    assert grad.dtype == table.dtype
    np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_by_an_operation_that_stays():
    """XLA for GPUs compiles a cast to bfloat16 and back into nothing."""
    call = lambda dtype: str(
        jax.make_jaxpr(lambda table: look_up(table, jnp.arange(3), dtype, "auto"))(jnp.ones((4, 8)))
    )
    assert "reduce_precision[exponent_bits=8 mantissa_bits=7]" in call(jnp.bfloat16)
    assert "reduce_precision" not in call(jnp.float32)


def test_unknown_words():
    """Their embeddings are NaN, and no word gets their gradients."""
    words = jnp.array([0, -1, 2, 3, 127, 128, 5000], jnp.int32)
    out, vjp = jax.vjp(lambda table: look_up(table, words, "float32", "auto"), jnp.ones((3, 8)))
    assert jnp.isnan(out).any(1).tolist() == [False, True, False, True, True, True, True]
    np.testing.assert_array_equal(vjp(jnp.ones_like(out))[0], [[1] * 8, [0] * 8, [1] * 8])
