"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxops
from jaxops.ops.grouped_glu import Plan, Tiles

M, K, F, G = 8, 4, 6, 3
OFFSETS = np.array([0, 2, 5, 8], np.int32)


def zeros(*sizes: int, dtype="float32"):
    return np.zeros(sizes, jnp.dtype(dtype))


GOOD = {"x": zeros(M, K), "w_gate": zeros(G, K, F), "w_up": zeros(G, K, F), "group_offsets": OFFSETS}

# What differs from the arguments above, the error, and what its message must name.
ERRORS = {
    "x-rank": ({"x": zeros(2, M, K)}, ValueError, r"x has shape \(2, 8, 4\).*\[M, K\]"),
    "x-list": ({"x": [[1.0] * K] * M}, TypeError, r"x is a list.*\[M, K\]"),
    "x-int": ({"x": zeros(M, K, dtype="int32")}, TypeError, r"x is int32.*bfloat16, float16, float32.*x\.astype"),
    "w_gate-rank": ({"w_gate": zeros(K, F)}, ValueError, r"w_gate has shape \(4, 6\).*\[G, K, F\]"),
    "w_gate-rank-joined": (
        {"w_gate": zeros(K, F), "w_up": None},
        ValueError,
        r"w_gate has shape \(4, 6\).*\[G, K, 2 F\]",
    ),
    "w_gate-odd": (
        {"w_gate": zeros(G, K, 7), "w_up": None},
        ValueError,
        r"w_gate has shape \(3, 4, 7\); without w_up.*\[G, K, 2 F\].*even",
    ),
    "w_up-shape": (
        {"w_up": zeros(G, K, F + 1)},
        ValueError,
        r"w_up has shape \(3, 4, 7\); it must be that of w_gate, \(3, 4, 6\)",
    ),
    "w_up-dtype": ({"w_up": zeros(G, K, F, dtype="bfloat16")}, TypeError, r"w_up is bfloat16 and w_gate is float32"),
    "w_up-int": ({"w_up": zeros(G, K, F, dtype="int8")}, TypeError, r"w_up is int8.*w_up\.astype"),
    "K": ({"x": zeros(M, K + 1)}, ValueError, r"K of x.* is 5.*K of w_gate \(3, 4, 6\) is 4"),
    "offsets-length": (
        {"group_offsets": OFFSETS[:-1]},
        ValueError,
        r"len\(group_offsets\) is 3; w_gate\.shape\[0\] = 3 groups need 4 offsets: the cumulative sum.*a 0 before it",
    ),
    "offsets-int64": (
        {"group_offsets": OFFSETS.astype(np.int64)},
        TypeError,
        r"group_offsets is int64.*group_offsets\.astype\(jnp\.int32\)",
    ),
    "two-dtypes": (
        {"x": zeros(M, K, dtype="bfloat16")},
        TypeError,
        r"x is bfloat16 and w_gate is float32.*compute_dtype=jnp\.bfloat16",
    ),
    "compute_dtype": ({"compute_dtype": jnp.int8}, TypeError, r"compute_dtype=int8.*bfloat16, float16, float32"),
    "activation": (
        {"activation": "swiglu"},
        ValueError,
        r"activation='swiglu': write 'silu', 'gelu', 'gelu_tanh', 'relu', 'sigmoid'",
    ),
    "activation-callable": ({"activation": jax.nn.silu}, ValueError, r"activation=.*: write 'silu'"),
    "save": ({"save": "all"}, ValueError, r"save='all': write 'preactivations', 'nothing'"),
    "backend": ({"backend": "cublas"}, ValueError, r"backend='cublas'.*'auto', 'triton', 'pallas' or 'xla'"),
    "plan-and-backend": (
        {"backend": "pallas", "plan": Plan("xla")},
        ValueError,
        r"backend='pallas' contradicts plan\.backend='xla'",
    ),
    "precision": (
        {"precision": lax.DotAlgorithmPreset.BF16_BF16_F32_X3},
        NotImplementedError,
        r"precision=BF16_BF16_F32_X3",
    ),
}


def test_what_the_errors_differ_from_is_right():
    """Otherwise a case below could fail for another reason than its own."""
    assert jax.eval_shape(lambda: jaxops.grouped_glu(**GOOD)).shape == (M, F)
    assert jax.eval_shape(lambda: jaxops.grouped_glu(**GOOD | {"w_up": None})).shape == (M, F // 2)


@pytest.mark.parametrize(("change", "error", "match"), ERRORS.values(), ids=ERRORS)
def test_error(change, error, match):
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda: jaxops.grouped_glu(**GOOD | change))  # runs nothing: the error needs no device


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rows": 12}, r"Tiles\.rows=12.*power of two"),
        ({"columns": 0}, r"Tiles\.columns=0.*power of two"),
        ({"warps": 6}, r"Tiles\.warps=6.*power of two"),
        ({"warps": 64}, r"Tiles\.warps=64.*at most 32"),
    ],
    ids=str,
)
def test_blocks_that_no_kernel_can_have(change, match):
    with pytest.raises(ValueError, match=match):
        Tiles(**{"rows": 4, "columns": 128, "warps": 4, **change})
