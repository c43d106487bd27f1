"""Casts of rows read through indices and of two matrices side by side: what is lowered for an H200, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops.ops.quantize import quantize_beside, quantize_gathered
from tests.hopper import costs_of, lower_for_h200
from tests.ops.quantize.cases import SCALINGS
from tests.ops.quantize.test_plan import KERNEL, kernels_in

RAGGED = SCALINGS[:3]


def lowered(fn, *shapes) -> tuple[list[str], set[str], list[tuple[str, int, int]]]:
    """The kernels, XLA's own operations, and the kernels' costs."""
    text = lower_for_h200(fn, *shapes)
    assert KERNEL in text
    return *kernels_in(text), costs_of(text)


@pytest.mark.parametrize("scaling", RAGGED)
def test_gathered_on_an_h200(scaling):
    """The rows are never in memory: the kernels read the tokens. (XLA gathers for the largest magnitude of all, which
    experts give.)"""
    s, T, k, D = jax.ShapeDtypeStruct, 16_384, 8, 2048
    given = s((T, D), "bfloat16"), s((T * k,), "int32"), s((65,), "int32")
    kernels, others, costs = lowered(functools.partial(quantize_gathered, scaling=scaling), *given)
    assert kernels == ["quantize_amax"] * (scaling == "rowwise") + ["schedule_rows", "quantize_cast"]
    assert not others & {"dynamic_slice", "transpose", "pad", "concatenate", "copy"}
    assert ("gather" in others) == (scaling == "tensorwise")
    tokens = T * D * 2 + T * k * 4
    assert all(tokens < nbytes < 1.3 * tokens for name, _, nbytes in costs if name == "quantize_amax")
    assert costs[-1][2] > tokens + T * k * D  # and writes a byte for each element of the rows
    assert costs[-1][2] < 1.1 * (tokens + T * k * D)
    amax = s((), "float32")
    if scaling == "tensorwise":
        fn = lambda x, i, o, amax: quantize_gathered(x, i, o, scaling=scaling, amax=amax)
        assert lowered(fn, *given, amax)[0] == ["schedule_rows", "quantize_cast"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_beside_on_an_h200(scaling, dtype):
    """Two matrices are never one array in memory, and are counted once."""
    E, D = 64, 2048
    for F, layouts in ((512, "both"), (512, "row"), (500, "both"), (77, "col")):
        w = jax.ShapeDtypeStruct((E, D, F), dtype)
        kernels, others, costs = lowered(functools.partial(quantize_beside, scaling=scaling, layouts=layouts), w, w)
        looks = scaling == "rowwise" and layouts != "row"
        assert kernels == ["quantize_amax"] * looks + ["quantize_cast"]
        assert not others & {"gather", "transpose", "pad", "concatenate", "copy"}
        read, written = 2 * E * D * F * w.dtype.itemsize, 2 * E * D * F * (1 + (layouts == "both"))
        assert read + written < costs[-1][2] < 1.1 * (read + written)


I32 = np.zeros(6, np.int32)
ERRORS = {
    "indices-rank": ((np.ones((6, 4)), I32[None]), ValueError, r"indices has shape \(1, 6\).*\[R\]"),
    "indices-int64": ((np.ones((6, 4)), I32.astype(np.int64)), TypeError, r"indices is int64.*astype\(jnp\.int32\)"),
    "indices-list": ((np.ones((6, 4)), [0]), TypeError, r"indices is a list.*int32 array \[R\]"),
    "no-tokens": ((np.ones((0, 4)), I32), ValueError, r"indices has shape \(6,\), but x has shape \(0, 4\).*no rows"),
    "stack": ((np.ones((1, 6, 4)), I32), ValueError, r"x has shape \(1, 6, 4\), a stack"),
    "no-offsets": ((np.ones((6, 4)), I32, None), TypeError, r"group_offsets is None"),
}


@pytest.mark.parametrize(("given", "error", "match"), ERRORS.values(), ids=ERRORS)
def test_errors_of_gathered(given, error, match):
    x, indices, *offsets = given
    offsets = offsets or [np.array([0, 6], np.int32)]
    with pytest.raises(error, match=match):
        quantize_gathered(x.astype(np.float32), indices, *offsets)


def test_errors_of_beside():
    x = jnp.ones((2, 6, 4))
    with pytest.raises(ValueError, match=r"left has shape \(2, 6, 4\), right \(2, 5, 4\).*all axes but the last"):
        quantize_beside(x, x[:, :5])
    with pytest.raises(ValueError, match=r"right \(6, 4\)"):
        quantize_beside(x, x[0])
    with pytest.raises(TypeError, match=r"left is float32 and right is bfloat16: cast one"):
        quantize_beside(x, x.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match=r"left is int8"):
        quantize_beside(x.astype(jnp.int8), x)
    with pytest.raises(ValueError, match=r"left has shape \(4,\).*left\.reshape"):
        quantize_beside(x[0, 0], x)
    with pytest.raises(TypeError, match=r"right is a list"):
        quantize_beside(x, [1.0])
    with pytest.raises(NotImplementedError, match=r"'block_128x128' does not take group_offsets"):
        quantize_gathered(x[0], jnp.zeros(3, jnp.int32), jnp.zeros(2, jnp.int32), scaling="block_128x128")
