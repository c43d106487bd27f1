"""The launch of a Pallas kernel: arrays of 1-byte numbers whose offsets JAX would overflow, and batches of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.pallas.launch_pallas import launch
from tests.anew import traced_anew
from tests.hopper import H200, lower_for_h200, on_h200
from tests.jaxprs import equations, kernel_arrays, overflow_int32
from tests.window import window

pytestmark = pytest.mark.versions

FP8, WIDTH = jnp.float8_e4m3fn, 16
ROWS = 70  # 1,120 bytes: more than int32 reaches, with the fixture
FULL = 200_000, 4096  # 0.8e9 numbers


@pytest.fixture
def small_window():
    with window(1000):
        yield


def _double_kernel(x_ref, bias_ref, out_ref, *, rows: int):
    row = pl.program_id(0) * 8 + jnp.arange(8, dtype=jnp.int32)[:, None]
    column = jnp.arange(x_ref.shape[1], dtype=jnp.int32)[None, :]
    mask = jnp.broadcast_to(row < rows, (8, x_ref.shape[1]))
    x = plgpu.load(x_ref.at[row, column], mask=mask, other=0.0).astype(jnp.float32)
    plgpu.store(out_ref.at[row, column], (2 * x + plgpu.load(bias_ref.at[column])).astype(out_ref.dtype), mask=mask)


def double(x, bias, dtype=FP8, interpret=True):
    """2 * x + bias in one launch."""
    rows, out = x.shape[0], out_struct(x.shape, dtype, like=x)
    kernel = functools.partial(_double_kernel, rows=rows)
    how = {"grid": (pl.cdiv(rows, 8),), "warps": 1, "interpret": interpret, "name": "double", "flops": 2 * x.size}
    return launch(kernel, x, bias, out=out, **how)


def x_of(*shape: int, dtype=FP8) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(-7, 8, shape), dtype)


BIAS = jnp.arange(WIDTH, dtype=jnp.float32) % 3


def check(got, x, bias=BIAS, dtype=FP8) -> None:
    assert got.dtype == dtype
    bias = jnp.broadcast_to(bias[..., None, :], x.shape)
    want = (2 * x.astype(jnp.float32) + bias).astype(dtype)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def shapes_of(fn, *operands, dtype=FP8) -> set[tuple[int, ...]]:
    """The shapes that kernels see of arrays of a dtype."""
    return {x.shape for x in kernel_arrays(jax.make_jaxpr(fn)(*operands).jaxpr) if x.dtype == dtype}


@pytest.mark.parametrize(
    "dtypes", [(FP8, FP8), (jnp.bfloat16, FP8), (FP8, jnp.bfloat16), (jnp.int8, jnp.bfloat16)], ids=str
)
def test_an_array_in_the_window_gets_more_rows(small_window, dtypes):
    given, wanted = dtypes
    x = x_of(ROWS, WIDTH, dtype=given)
    check(jax.jit(functools.partial(double, dtype=wanted))(x, BIAS), x, dtype=wanted)
    for dtype in dtypes:
        want = (2000 // WIDTH + 1 if dtype.dtype.itemsize == 1 else ROWS, WIDTH)
        assert shapes_of(functools.partial(double, dtype=wanted), x, BIAS, dtype=dtype) == {want}


@pytest.mark.parametrize("rows", [62, 63, 125, 126])
def test_the_windows_ends(small_window, rows):
    """1,000 elements are reached, 2,000 bytes are not yet counted in int64."""
    x = x_of(rows, WIDTH)
    check(jax.jit(double)(x, BIAS), x)
    assert shapes_of(double, x, BIAS) == {(126 if 62 < rows <= 125 else rows, WIDTH)}


@pytest.mark.parametrize("shape", [(9, 10, WIDTH), (3, 3, 10, WIDTH), (2, ROWS, WIDTH), (3, 2, 4, WIDTH)], ids=str)
def test_batches(small_window, shape):
    """Batches in the window run one example after another, also batches of batches; others are one launch."""
    x, batched = x_of(*shape), double
    for _ in shape[2:]:
        batched = jax.vmap(batched, in_axes=(0, None))
    check(jax.jit(batched)(x, BIAS), x)
    scans = [
        equation for equation in equations(jax.make_jaxpr(batched)(x, BIAS).jaxpr) if equation.primitive.name == "scan"
    ]
    assert bool(scans) == (x.size > 1000 and shape[-2] != ROWS)
    assert all(np.prod(seen) <= 1000 or np.prod(seen) > 2000 for seen in shapes_of(batched, x, BIAS))


def test_batched_operands_beside_unbatched_ones(small_window):
    """Whichever is batched; and only the result falls into the window."""
    x, biases = x_of(10, WIDTH), jnp.arange(9 * WIDTH, dtype=jnp.float32).reshape(9, WIDTH) % 4
    of_biases = jax.vmap(double, in_axes=(None, 0))
    check(jax.jit(of_biases)(x, biases), jnp.broadcast_to(x, (9, 10, WIDTH)), biases)
    assert shapes_of(of_biases, x, biases) == {(10, WIDTH)}
    xs = x_of(9, 10, WIDTH)
    check(jax.jit(jax.vmap(double, in_axes=(0, 0), out_axes=1))(xs, biases).swapaxes(0, 1), xs, biases)


def test_other_dtypes_are_as_jax_batches_them(small_window):
    x = x_of(9, 10, WIDTH, dtype=jnp.float32)
    batched = jax.vmap(functools.partial(double, dtype=jnp.float32), in_axes=(0, None))
    check(jax.jit(batched)(x, BIAS), x, dtype=jnp.float32)
    names = [equation.primitive.name for equation in equations(jax.make_jaxpr(batched)(x, BIAS).jaxpr)]
    assert "pallas_call" in names
    assert not {"scan", "custom_vmap_call"} & set(names)


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_no_kernel_overflows_on_an_h200(batch, monkeypatch):
    """The sizes that are, lowered without a GPU: 2.4e9 FP8 numbers in one array, and in batches; without the rule the
    kernels would, so this test and tests/contracts/test_index_width.py look for what is there."""
    on_gpu = functools.partial(double, interpret=False)
    for _ in batch:
        on_gpu = jax.vmap(on_gpu, in_axes=(0, None))
    shape = (*batch, *FULL) if batch else (3 * FULL[0], FULL[1])
    x, bias = jax.ShapeDtypeStruct(shape, "bfloat16"), jax.ShapeDtypeStruct((FULL[1],), "float32")

    def seen() -> list:
        with on_h200():
            return kernel_arrays(jax.make_jaxpr(on_gpu)(x, bias).jaxpr)

    assert any(array.dtype == FP8 for array in seen())
    assert not overflow_int32(seen())
    assert "triton" in lower_for_h200(on_gpu, x, bias)
    monkeypatch.setattr("jaxops._lib.pallas.launch_pallas._overflows", lambda x: False)
    with traced_anew():
        assert overflow_int32(seen())


def test_shard_map_checks_varying_axes(small_window):
    """check_vma=True with a replicated operand: results vary as the sharded one, alone and in a batch."""
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)
    on_gpu = functools.partial(double, interpret=False)

    def lower(fn, *shapes, **specs) -> str:
        with jax.sharding.use_abstract_mesh(mesh):
            sharded = jax.shard_map(fn, mesh=mesh, **specs)
            return jax.jit(sharded).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()

    s = jax.ShapeDtypeStruct
    assert "triton" in lower(
        on_gpu, s((2 * ROWS, WIDTH), FP8), s((WIDTH,), "float32"), in_specs=(P("d"), P()), out_specs=P("d")
    )
    batched = jax.vmap(on_gpu, in_axes=(0, None))
    assert "while" in lower(
        batched, s((9, 20, WIDTH), FP8), s((WIDTH,), "float32"), in_specs=(P(None, "d"), P()), out_specs=P(None, "d")
    )
