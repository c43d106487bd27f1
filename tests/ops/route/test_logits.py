"""The router's product: as precise as float32, in values and gradients, however it is computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops._lib.planning.device import Device
from jaxops.ops.route import logits, router_logits
from tests.arrays import put
from tests.hopper import lower_for_h200

# Both ways on a CPU; on a GPU what a router there takes.
WAYS = ["plain", "parts", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=WAYS)
def product(request, monkeypatch):
    if request.param != "gpu":
        capability = (9, 0) if request.param == "parts" else None  # of a CPU: few tokens' kernel is interpreted
        monkeypatch.setattr(logits, "device_of", lambda *operands: Device("cpu", "cpu", capability))
    return router_logits


def operands(T: int, D: int, E: int, dtype: str = "bfloat16") -> tuple[jax.Array, ...]:
    """Kernel and cotangent of very different sizes, and of all mantissas."""
    rng = np.random.default_rng(T)
    x, kernel, d = (rng.normal(size=shape) for shape in ((T, D), (D, E), (T, E)))
    return (put(x, dtype), put(kernel * 10.0 ** rng.integers(-4, 4, size=(D, 1)), jnp.float32), put(d, jnp.float32))


def error(got, want) -> float:
    return float(np.sqrt(np.mean((np.asarray(got, np.float64) - want) ** 2) / np.mean(want**2)))


def allowed(lhs: np.ndarray, rhs: np.ndarray) -> float:
    """1e-6, or the error of adding float32 products one after another: on some CPUs XLA does."""
    products = (lhs[:, :, None] * rhs[None, :, :]).astype(np.float32)
    return max(1e-6, error(np.cumsum(products, axis=1, dtype=np.float32)[:, -1], lhs @ rhs))


# Then sums in two pieces, and of a prime length; then few tokens, of columns and rows in several parts.
SHAPES = [(37, 65, 5), (64, 1000, 8), (8194, 6, 2), (17, 8209, 3), (1, 3, 1), (1, 64, 16), (16, 2051, 19)]


@pytest.mark.parametrize(("T", "D", "E"), SHAPES)
def test_as_float32(product, T, D, E):
    """TF32 would be 2e-4 off, two parts of the kernel 4e-6."""
    x, kernel, d = operands(T, D, E)
    y, vjp = jax.vjp(product, x, kernel)
    dx, dkernel = vjp(d)
    x64, kernel64, d64 = (np.asarray(a, np.float64) for a in (x, kernel, d))
    assert (y.dtype, dx.dtype, dkernel.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert error(y, x64 @ kernel64) <= allowed(x64, kernel64)
    assert error(dkernel, x64.T @ d64) <= allowed(x64.T, d64)
    # The gradient of x rounds where the unrounded one does, but for what lies next to a tie.
    want = put((d64 @ kernel64.T).astype(np.float32), jnp.bfloat16)
    assert np.mean(np.asarray(dx) != np.asarray(want)) < 0.01


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes(product, dtype):
    x, kernel, _ = operands(37, 65, 5, dtype)
    assert error(product(x, kernel), np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)) < 1e-6


def test_second_derivative(product):
    x, kernel, d = operands(9, 17, 3)
    kernel = jnp.sin(kernel)  # of one size: sin magnifies the rounding of large numbers

    def gradient_of_kernel(product, x, kernel):
        return jnp.sum(jax.grad(lambda kernel: jnp.sum(d * jnp.sin(product(x, kernel))))(kernel) ** 2)

    want = jax.grad(lambda kernel: gradient_of_kernel(logits._plain, x, kernel))(kernel)
    assert (
        error(jax.grad(lambda kernel: gradient_of_kernel(product, x, kernel))(kernel), np.asarray(want, np.float64))
        < 1e-4
    )


def test_few_tokens_are_one_kernel():
    """Many tokens take none, nor does the xla backend."""
    for T, backend, few in ((1, "auto", True), (16, "pallas", True), (17, "auto", False), (1, "xla", False)):
        x, kernel = jax.ShapeDtypeStruct((T, 2048), "bfloat16"), jax.ShapeDtypeStruct((2048, 128), "float32")
        text = lower_for_h200(functools.partial(router_logits, backend=backend), x, kernel)
        assert ("stablehlo.dot_general" not in text) == few  # what follows adds the parts of the sums
        assert text.count("stablehlo.custom_call") == few
        assert ("router_logits" in text) == few
    with pytest.raises(ValueError, match="backend"):
        router_logits(jnp.ones((1, 4)), jnp.ones((4, 2)), backend="triton")


def test_rows_do_not_mix(product):
    """NaN in a token reaches no other one's logits."""
    x, kernel, _ = operands(3, 65, 5)
    y = product(x.at[1].set(jnp.nan), kernel)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[::2], product(x, kernel)[::2])
