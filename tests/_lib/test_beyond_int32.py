"""FP8 arrays of over 2^31 numbers, of every op that has such: no kernel counts their elements in int32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.adaln import Plan, Tiles
from tests.anew import traced_anew
from tests.hopper import lower_for_h200, on_h200
from tests.jaxprs import kernel_arrays, overflow_int32

pytestmark = pytest.mark.versions

E4M3 = "float8_e4m3fn"
ROWS, COLUMNS = 600_000, 4096  # 2.46e9 numbers


def s(*shape: int, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def adaln(x, scale, shift):
    return jaxops.adaln(x, scale, shift, out_dtype=E4M3)


def quantize(x, **options):
    return jaxops.quantize(x, **options)


def fp8_gradients(x, w):
    return jax.vjp(lambda x, w: jaxops.fp8_matmul(x, w, backend="pallas"), x, w)[1](
        jnp.zeros((x.shape[0], w.shape[1]), x.dtype)
    )


def fp8_grouped_gradients(x, w, offsets):
    y, vjp = jax.vjp(lambda x, w: jaxops.fp8_grouped_matmul(x, w, offsets, backend="pallas"), x, w)
    return vjp(y)


THIRD = s(3, ROWS // 3, COLUMNS)
CASES = {
    "adaln": (adaln, s(ROWS, COLUMNS), s(1, COLUMNS), s(1, COLUMNS)),
    "vmap-adaln": (jax.vmap(adaln, in_axes=(0, None, None)), THIRD, s(1, COLUMNS), s(1, COLUMNS)),
    **{
        f"quantize-{scaling}": (functools.partial(quantize, scaling=scaling, layouts="both"), s(ROWS, COLUMNS))
        for scaling in ("tensorwise", "block_1x128")
    },
    "quantize-stack": (functools.partial(quantize, scaling="block_128x128", layouts="both"), THIRD),
    "quantize-ragged": (
        lambda x, offsets: quantize(x, group_offsets=offsets, layouts="both"),
        s(2**19 - 64, 4096),
        s(9, dtype="int32"),
    ),
    "vmap-quantize": (jax.vmap(quantize), THIRD),
    "vmap-vmap-quantize": (
        jax.vmap(jax.vmap(functools.partial(quantize, layouts="both"))),
        s(3, 2, ROWS // 6, COLUMNS),
    ),
    "fp8_matmul": (fp8_gradients, s(ROWS, COLUMNS), s(COLUMNS, 128)),
    "vmap-fp8_matmul": (jax.vmap(fp8_gradients, in_axes=(0, None)), THIRD, s(COLUMNS, 128)),
    "fp8_grouped_matmul": (
        fp8_grouped_gradients,
        s(1024, 7168),
        s(256, 7168, 2048),
        s(257, dtype="int32"),
    ),  # DeepSeek-V3's experts: 3.76e9
}


@pytest.mark.parametrize("name", CASES)
def test_no_kernel_counts_them_in_int32(name):
    fn, *shapes = CASES[name]
    with on_h200():
        seen = kernel_arrays(jax.make_jaxpr(fn)(*shapes).jaxpr)
    assert any(x.dtype == E4M3 and (x.size > 2**32 or "vmap" in name) for x in seen)
    assert not overflow_int32(seen)


@pytest.mark.parametrize("name", ["adaln", "vmap-quantize", "fp8_grouped_matmul"])
def test_they_lower(name):
    fn, *shapes = CASES[name]
    assert "__gpu$xla.gpu.triton" in lower_for_h200(fn, *shapes)


def test_without_the_rule_they_would():
    """What the other tests look for is there where the kernels are launched otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxops._lib.pallas.launch_pallas._overflows", lambda x: False)
        for name in ("adaln", "vmap-quantize"):
            fn, *shapes = CASES[name]
            with on_h200(), traced_anew():
                assert overflow_int32(kernel_arrays(jax.make_jaxpr(fn)(*shapes).jaxpr))


# On a GPU of 80 GB. Where int32 ends, before it, behind it, and the last rows.
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


def check_rows(values, scales, make, expected_checksums) -> None:
    """values [ROWS, COLUMNS], scales [COLUMNS / 128, ROWS]: some rows by float32, all by the checksums of XLA's."""
    for rows in SAMPLES:
        want = np.asarray(make(rows.start, rows.stop - rows.start), np.float32)
        scale = np.repeat(np.asarray(scales[:, rows]).T, 128, axis=1)
        got = np.asarray(values[rows]).astype(np.float32) * scale
        assert (np.abs(got - want) <= np.maximum(2.0**-4 * np.abs(want), 2.0**-10 * scale) * 1.02 + 1e-5).all(), rows
        assert np.abs(got).mean() > 0.1
    np.testing.assert_array_equal(checksums(values, CHUNK), expected_checksums)


@pytest.mark.gpu
def test_quantize_on_a_gpu():
    """One matrix, and a batch of three: the same bits as the portable backend's for each chunk of rows."""

    def of_chunk(i):
        return checksums(jaxops.quantize(numbers(i * CHUNK, CHUNK), backend="xla").values, CHUNK)[0]

    want = np.asarray(jax.jit(lambda: jax.lax.map(of_chunk, jnp.arange(ROWS // CHUNK, dtype=jnp.int32)))())
    assert len(set(want.tolist())) > 0.9 * len(want)
    x = make_x()
    q = jax.jit(functools.partial(jaxops.quantize, backend="pallas"))(x)
    check_rows(q.values, q.scales, numbers, want)
    del q
    q = jax.jit(jax.vmap(functools.partial(jaxops.quantize, backend="pallas")))(x.reshape(THIRD.shape))
    check_rows(q.values.reshape(ROWS, COLUMNS), np.concatenate(np.asarray(q.scales), axis=1), numbers, want)


@pytest.mark.gpu
def test_adaln_on_a_gpu():
    """2.46e9 elements: some rows by float32, all by the same kernel's checksums of chunks that int32 can index."""
    x, scale, shift = make_x(), jnp.full((1, COLUMNS), 0.5, jnp.bfloat16), jnp.full((1, COLUMNS), -0.25, jnp.bfloat16)
    plan = Plan("pallas", Tiles(4, 1, COLUMNS, 8))  # one for both sizes: other tiles may sum a row in another order
    f = jax.jit(functools.partial(jaxops.adaln, out_dtype=E4M3, plan=plan))

    def reference(first: int, count: int):
        rows = numbers(first, count).astype(jnp.float32)
        rows = rows - rows.mean(axis=1, keepdims=True)
        return 1.5 * rows * jax.lax.rsqrt(jnp.mean(rows * rows, axis=1, keepdims=True) + 1e-6) - 0.25

    want = np.concatenate(
        [checksums(f(numbers(first, CHUNK), scale, shift).values, CHUNK) for first in range(0, ROWS, CHUNK)]
    )
    assert len(set(want.tolist())) > 0.9 * len(want)
    q = f(x, scale, shift)
    check_rows(q.values, q.scales, reference, want)
