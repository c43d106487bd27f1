import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxops._lib.numerics import instructions
from jaxops._lib.pallas.launch_pallas import launch
from tests.hopper import on_h200

pytestmark = pytest.mark.versions

# The function, its twin, and what its assembly has.
PAIRS = {
    "rsqrt": (instructions.rsqrt, lax.rsqrt, "float32", "rsqrt.approx.ftz.f32"),
    "exp2": (instructions.exp2, jnp.exp2, "float32", "ex2.approx.ftz.f32"),
    "widened": (instructions.widened, lambda x: x.astype(jnp.float32), "bfloat16", "0xffff0000"),
    "infinity_to_nan": (instructions.infinity_to_nan, lambda x: (x * 0 + x).astype(jnp.float32), "bfloat16", "bf16x2"),
}


def _in_kernel(fn, interpret: bool):
    def kernel(x_ref, out_ref):
        out_ref[:] = fn(x_ref[:])

    def call(x):
        out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return launch(kernel, x, out=out, grid=(1,), warps=1, interpret=interpret, name="test", flops=0)

    return call


@pytest.mark.parametrize("name", PAIRS)
def test_interpreted_kernels_have_plain_jax(name):
    fn, plain, dtype, _ = PAIRS[name]
    x = jnp.asarray([1.5, 0.25, 3, jnp.inf, jnp.nan, 7, 1, 2.0**-100], dtype)
    for call in (fn, _in_kernel(fn, interpret=True)):
        np.testing.assert_array_equal(call(x), plain(x))


@pytest.mark.parametrize("name", PAIRS)
def test_kernels_for_a_gpu_have_assembly(name):
    fn, _, dtype, mnemonic = PAIRS[name]
    x = jax.ShapeDtypeStruct((128,), dtype)
    with on_h200():
        traced = jax.jit(_in_kernel(fn, interpret=False)).trace(x)
        traced.lower(lowering_platforms=("cuda",))
    assert mnemonic in str(traced.jaxpr)
    assert "asm" not in str(jax.make_jaxpr(fn)(x))


@pytest.mark.parametrize("fn", [instructions.widened, instructions.infinity_to_nan])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_have_no_pairs(fn, dtype):
    x = jax.ShapeDtypeStruct((128,), dtype)
    assert "asm" not in str(jax.make_jaxpr(_in_kernel(fn, interpret=False))(x))
