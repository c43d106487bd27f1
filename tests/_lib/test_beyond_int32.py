"""FP8 arrays of over 2^31 numbers, on a GPU of 80 GB: what tests/contracts/test_index_width.py sees in the program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 600_000, 4096  # 2.46e9 numbers
# Where int32 ends, before it, behind it, and the last rows.
END = 2**31 // COLUMNS
SAMPLES = [slice(first, first + 64) for first in (0, END - 64, END, END + 4096, ROWS - 64)]
CHUNK = 20_000


def numbers(first, count: int, columns: int = COLUMNS) -> jax.Array:
    """Rows of a bfloat16 matrix without two equal ones, anywhere between -1 and 1."""
    row, column = first + jnp.arange(count, dtype=jnp.int32)[:, None], jnp.arange(columns, dtype=jnp.int32)[None, :]
    mixed = (row * 1_000_003 + column * 7919) * -1_640_531_527
    return (mixed.astype(jnp.float32) * 2.0**-31).astype(jnp.bfloat16)


@jax.jit
def make_x() -> jax.Array:
    return jax.lax.map(lambda i: numbers(i * CHUNK, CHUNK), jnp.arange(ROWS // CHUNK, dtype=jnp.int32)).reshape(
        ROWS, COLUMNS
    )


@functools.partial(jax.jit, static_argnums=1)
def checksums(values: jax.Array, count: int) -> jax.Array:
    """For each chunk of rows, the sum of its bytes times weights that differ by row and column; int32, which wraps."""

    def one(i):
        part = jax.lax.dynamic_slice_in_dim(values, i * count, count)
        bytes_ = jax.lax.bitcast_convert_type(part, jnp.uint8).astype(jnp.int32)
        row, column = jnp.arange(count, dtype=jnp.int32)[:, None], jnp.arange(part.shape[1], dtype=jnp.int32)[None, :]
        return jnp.sum(bytes_ * ((row * 40_503 + column * 2 + 1) | 1), dtype=jnp.int32)

    return jax.lax.map(one, jnp.arange(values.shape[0] // count, dtype=jnp.int32))


def check_rows(values, scales, expected_checksums) -> None:
    """values [ROWS, COLUMNS], scales [COLUMNS / 128, ROWS]: some rows by float32, all by the checksums of XLA's."""
    for rows in SAMPLES:
        want = np.asarray(numbers(rows.start, rows.stop - rows.start), np.float32)
        scale = np.repeat(np.asarray(scales[:, rows]).T, 128, axis=1)
        got = np.asarray(values[rows]).astype(np.float32) * scale
        assert (np.abs(got - want) <= np.maximum(2.0**-4 * np.abs(want), 2.0**-10 * scale) * 1.02 + 1e-5).all(), rows
        assert np.abs(got).mean() > 0.1
    np.testing.assert_array_equal(checksums(values, CHUNK), expected_checksums)


def test_quantize_on_a_gpu():
    """One matrix, and a batch of three: the same bits as the portable backend's for each chunk of rows."""

    def of_chunk(i):
        return checksums(jaxops.quantize(numbers(i * CHUNK, CHUNK), backend="xla").values, CHUNK)[0]

    want = np.asarray(jax.jit(lambda: jax.lax.map(of_chunk, jnp.arange(ROWS // CHUNK, dtype=jnp.int32)))())
    assert len(set(want.tolist())) > 0.9 * len(want)
    x = make_x()
    q = jax.jit(functools.partial(jaxops.quantize, backend="pallas"))(x)
    check_rows(q.values, q.scales, want)
    del q
    q = jax.jit(jax.vmap(functools.partial(jaxops.quantize, backend="pallas")))(x.reshape(3, ROWS // 3, COLUMNS))
    check_rows(q.values.reshape(ROWS, COLUMNS), np.concatenate(np.asarray(q.scales), axis=1), want)
