"""`jaxops.bucket_length`: every length fits its bucket, little is padded, and buckets are few."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops

SMALL = st.integers(1, 300)


@hypothesis.settings(max_examples=300)
@hypothesis.given(length=st.integers(0, 10_000_000), multiple=SMALL, steps=st.integers(1, 40))
def test_buckets(length, multiple, steps):
    bucket = jaxops.bucket_length(length, multiple=multiple, steps=steps)
    assert bucket >= length
    assert bucket % multiple == 0
    assert bucket - length < max(multiple, length / steps)
    assert jaxops.bucket_length(bucket, multiple=multiple, steps=steps) == bucket
    assert jaxops.bucket_length(length + 1, multiple=multiple, steps=steps) >= bucket


@hypothesis.given(multiple=SMALL, steps=st.integers(1, 40), octave=st.integers(1, 6))
def test_as_many_an_octave_as_steps(multiple, steps, octave):
    low = 2**octave * steps * multiple
    lengths = np.linspace(low + 1, 2 * low, 2000).astype(int)
    assert len({jaxops.bucket_length(int(n), multiple=multiple, steps=steps) for n in lengths}) == min(
        steps, len(set(lengths.tolist()))
    )


@pytest.mark.parametrize(
    ("named", "message"),
    [({"length": -1}, "length is -1"), ({"multiple": 0}, "multiple is 0"), ({"steps": 0}, "steps is 0")],
)
def test_errors(named, message):
    with pytest.raises(ValueError, match=f"{message}; it must be at least"):
        jaxops.bucket_length(**({"length": 5} | named))


def test_lengths_of_a_bucket_share_a_program():
    matmul = jax.jit(lambda rows, experts, offsets: jaxops.grouped_matmul(rows, experts, offsets))
    experts = jnp.stack([jnp.eye(4), 2 * jnp.eye(4)])
    for length in (33, 40, 64):
        rows = np.full((jaxops.bucket_length(length, multiple=32), 4), np.nan, np.float32)
        rows[:length] = 1
        out = matmul(rows, experts, jnp.array([0, 20, length], jnp.int32))
        np.testing.assert_array_equal(out[:, 0], np.repeat([1, 2, 0], [20, length - 20, len(rows) - length]))
    assert matmul._cache_size() == 1
