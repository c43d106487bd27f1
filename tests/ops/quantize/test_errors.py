"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead.

Wrong arrays, options and devices, one by one: tests/contracts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.quantize import Plan, Tiles

M, K = 6, 10
OFFSETS = np.array([0, 2, 6], np.int32)


def shape(*sizes: int, dtype="float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def tiles(*sizes: int, **options) -> dict:
    return {"plan": Plan("pallas", Tiles(*sizes)), **options}


TENSOR, STACK = {"scaling": "tensorwise"}, shape(2, M, K)
SHAPES, TYPES, GAPS = ValueError, TypeError, NotImplementedError
ERRORS = [
    ({"x": shape(K)}, SHAPES, r"x has shape \(10,\).*\[M, K\] or a stack \[G, M, K\].*reshape"),
    ({"dtype": jnp.float8_e4m3fnuz}, TYPES, r"dtype=float8_e4m3fnuz"),
    ({"backend": "xla", "plan": Plan("pallas")}, SHAPES, r"backend='xla' contradicts plan\.backend='pallas'"),
    ({"x": STACK, "group_offsets": OFFSETS}, SHAPES, r"x has shape \(2, 6, 10\), a stack.*one matrix \[M, K\]"),
    (
        {"scaling": "block_128x128", "group_offsets": OFFSETS},
        GAPS,
        r"'block_128x128' does not take group_offsets.*'block_1x128'",
    ),
    ({"amax": np.float32(1)}, SHAPES, r"amax is one number.*scaling='block_1x128'.*'tensorwise'"),
    (TENSOR | {"amax": np.float16(1)}, TYPES, r"amax is float16.*amax\.astype\(jnp\.float32\)"),
    (TENSOR | {"amax": 1.0}, TYPES, r"amax is a float.*float32 scalar"),
    (TENSOR | {"amax": np.ones(2, np.float32)}, SHAPES, r"amax has shape \(2,\).*must be \(\)"),
    # Tiles that cut what shares a scale.
    (tiles(64, 128, layouts="both"), SHAPES, r"rows must be 128 .*layouts='both'"),
    (tiles(128, 256, layouts="col"), SHAPES, r"cols must be at most 128"),
    (tiles(16, 64), SHAPES, r"cols must be a multiple of 128"),
    (tiles(128, 64, scaling="block_128x128"), SHAPES, r"cols must be a multiple of 128"),
]


@pytest.mark.parametrize(("change", "error", "match"), ERRORS, ids=[match[:24] for _, _, match in ERRORS])
def test_error(change, error, match):
    """The error needs no device and no value: eval_shape runs nothing."""
    given = {"x": shape(M, K)} | change
    x = given.pop("x")
    call = lambda *x: jaxops.quantize(*x, **given)
    with pytest.raises(error, match=match):
        jax.eval_shape(call, x) if hasattr(x, "shape") else call(x)


def test_dequantize_of_something_else():
    with pytest.raises(TypeError, match=r"q is a.*jaxops\.quantize"):
        jaxops.dequantize(jnp.ones((2, 2)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        *(({name: 12}, rf"Tiles\.{name}=12.*power of two") for name in ("rows", "cols", "patch", "near", "panel")),
        ({"warps": 64}, r"Tiles\.warps=64.*at most 32"),
        ({"patch": 16, "near": 2}, r"Tiles\.patch=16 times Tiles\.near=2.*at most Tiles\.rows=16"),
        ({"programs": 0}, r"Tiles\.programs=0 must be at least 1"),
    ],
    ids=str,
)
def test_tiles_that_no_kernel_can_have(change, match):
    with pytest.raises(ValueError, match=match):
        Tiles(**{"rows": 16, "cols": 128, **change})
