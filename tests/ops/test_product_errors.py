"""Operands of grouped products that do not fit each other: an error before anything is launched, which says what was
passed and what to write instead. tests/contracts has each array and each option by itself."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxops
from jaxops.ops import grouped_matmul

OFFSETS = np.array([0, 2, 5, 8], np.int32)


def shape(*sizes: int, dtype="float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


GROUPS = {"group_offsets": OFFSETS}
RHS = shape(1, 4, 6), shape(2, 3, 8)
RIGHT: dict[str, dict[str, Any]] = {
    "grouped_matmul": {"lhs": shape(8, 4), "rhs": shape(3, 4, 6)} | GROUPS,
    "grouped_wgrad": {"lhs": shape(8, 4), "dout": shape(8, 6)} | GROUPS,
    "grouped_glu": {"x": shape(8, 4), "w_gate": shape(3, 4, 6), "w_up": shape(3, 4, 6)} | GROUPS,
    "modality_grouped_matmul": {"lhs": shape(8, 4), "rhs": RHS} | GROUPS,
}
XLA, PALLAS = grouped_matmul.Plan("xla"), grouped_matmul.Plan("pallas")
X3 = {"precision": "BF16_BF16_F32_X3"}
# The function, what differs from the arguments above, the error, and what its message must name.
WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("grouped_matmul", {"lhs": shape(8, 5)}, ValueError, r"K of lhs.* is 5.*K of rhs \(3, 4, 6\).* is 4"),
    ("grouped_matmul", {"transpose_rhs": True}, ValueError, r"K of lhs.* is 4.*rhs \(3, 4, 6\) \(transposed\) is 6"),
    ("grouped_matmul", {"rhs": shape(6, 4), "transpose_rhs": True}, ValueError, r"rhs has shape \(6, 4\).*\[G, N, K\]"),
    ("grouped_matmul", {"group_offsets": OFFSETS[:-1]}, ValueError,
     r"len\(group_offsets\) is 3; rhs\.shape\[0\] = 3 groups need 4 offsets: the cumulative sum.*a 0 before it"),
    ("grouped_matmul", {"group_offsets": np.append(OFFSETS, np.int32(8))}, ValueError, "is 5; .* 3 groups need 4 offs"),
    ("grouped_matmul", {"lhs": shape(8, 4, dtype="bfloat16")}, TypeError,
     r"lhs is bfloat16 and rhs is float32.*compute_dtype=jnp\.bfloat16"),
    ("grouped_matmul", {"bias": shape(3, 7)}, ValueError, r"bias has shape \(3, 7\).*\[G, N\] = \(3, 6\)"),
    ("grouped_matmul", {"backend": "triton"}, NotImplementedError, "needs a Hopper GPU.*this is cpu"),
    ("grouped_matmul", X3, NotImplementedError, "BF16_BF16_F32_X3.*'highest'"),
    ("grouped_wgrad", {"dout": shape(9, 6)}, ValueError, "M of dout.* is 9.*M of lhs is 8"),
    ("grouped_wgrad", {"group_offsets": OFFSETS[:0]}, ValueError, r"group_offsets has shape \(0,\).*\(G \+ 1,\)"),
    ("grouped_wgrad", {"dout": shape(8, 6, dtype="float16")}, TypeError, "lhs is float32 and dout is float16.*cast"),
    ("grouped_wgrad", {"accumulate_into": shape(3, 6, 4)}, ValueError,
     r"accumulate_into has shape \(3, 6, 4\).*\[G, K, N\] = \(3, 4, 6\)"),
    ("grouped_wgrad", {"accumulate_into": shape(3, 4, 6), "out_dtype": "bfloat16"}, TypeError,
     "out_dtype is bfloat16, but accumulate_into is float32.*leave out_dtype"),
    ("grouped_wgrad", X3, NotImplementedError, "BF16_BF16_F32_X3.*'highest'"),
    ("grouped_glu", {"x": shape(8, 5)}, ValueError, r"K of x.* is 5.*K of w_gate \(3, 4, 6\) is 4"),
    ("grouped_glu", {"w_gate": shape(4, 6), "w_up": None}, ValueError, r"w_gate has shape \(4, 6\).*\[G, K, 2 F\]"),
    ("grouped_glu", {"w_gate": shape(3, 4, 7), "w_up": None}, ValueError,
     r"w_gate has shape \(3, 4, 7\); without w_up.*\[G, K, 2 F\].*even"),
    ("grouped_glu", {"w_up": shape(3, 4, 7)}, ValueError, r"w_up has shape \(3, 4, 7\); .*w_gate, \(3, 4, 6\)"),
    ("grouped_glu", {"w_up": shape(3, 4, 6, dtype="bfloat16")}, TypeError, "w_up is bfloat16 and w_gate is float32"),
    ("grouped_glu", {"x": shape(8, 4, dtype="bfloat16")}, TypeError,
     r"x is bfloat16 and w_gate is float32.*compute_dtype=jnp\.bfloat16"),
    ("grouped_glu", {"group_offsets": OFFSETS[:-1]}, ValueError, r"is 3; w_gate\.shape\[0\] = 3 groups need 4 offsets"),
    ("grouped_glu", X3, NotImplementedError, "precision=BF16_BF16_F32_X3"),
    ("modality_grouped_matmul", {"rhs": RHS[0]}, TypeError,
     r"rhs is an array; pass a tuple of one array \[G, K, N\] a modality.*jaxops\.grouped_matmul"),
    ("modality_grouped_matmul", {"rhs": ()}, ValueError, r"rhs is empty; pass a tuple of one array \[G, K, N\]"),
    ("modality_grouped_matmul", {"rhs": (RHS[0], shape(3, 8))}, ValueError, r"rhs\[1\] has shape \(3, 8\).*\[G, K"),
    ("modality_grouped_matmul", {"rhs": (shape(4, 6), RHS[1]), "transpose_rhs": True}, ValueError,
     r"rhs\[0\] has shape \(4, 6\).*\[G, N, K\]"),
    ("modality_grouped_matmul", {"rhs": (RHS[0], shape(2, 3, 8, dtype="int8"))}, TypeError, r"rhs\[1\] is int8"),
    ("modality_grouped_matmul", {"rhs": (RHS[0], shape(2, 3, 8, dtype="bfloat16"))}, TypeError,
     r"rhs\[0\] is float32 and rhs\[1\] is bfloat16.*one dtype"),
    ("modality_grouped_matmul", {"lhs": shape(8, 4, dtype="bfloat16")}, TypeError,
     r"lhs is bfloat16 and rhs is float32.*compute_dtype=jnp\.bfloat16 \(the gradients of rhs"),
    ("modality_grouped_matmul", {"lhs": shape(8, 3)}, ValueError,
     r"K of lhs.* is 3.*the largest K of rhs \[\(1, 4, 6\), \(2, 3, 8\)\] is 4"),
    ("modality_grouped_matmul", {"lhs": shape(8, 5)}, ValueError, "K of lhs.* is 5.*the largest K of rhs.* is 4"),
    ("modality_grouped_matmul", {"transpose_rhs": True}, ValueError, "K of lhs.* is 4.*the largest K of rhs.* is 8"),
    ("modality_grouped_matmul", {"group_offsets": OFFSETS[:-1]}, ValueError,
     r"is 3; the sum of all rhs\[i\]\.shape\[0\] = 3 groups need 4 offsets"),
    ("modality_grouped_matmul", {"plan": (XLA,)}, ValueError,
     "plan has 1 plans; rhs has 2 modalities: write one Plan for each, or one for all"),
    ("modality_grouped_matmul", {"plan": (XLA, PALLAS)}, ValueError, "backends pallas, xla.*the same one"),
    ("modality_grouped_matmul", X3, NotImplementedError, "BF16_BF16_F32_X3.*'highest'"),
]  # fmt: skip


def trace(name: str, arguments: dict[str, Any]) -> Any:
    """Runs nothing: an error needs no device and no value."""
    is_traced = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    arrays = {key: x for key, x in arguments.items() if all(map(is_traced, jax.tree.leaves(x))) and jax.tree.leaves(x)}
    rest = {key: x for key, x in arguments.items() if key not in arrays}
    return jax.eval_shape(lambda arrays: getattr(jaxops, name)(**arrays, **rest), arrays)


@pytest.mark.parametrize("name", RIGHT)
def test_what_the_errors_differ_from_is_right(name):
    """Otherwise a case below could fail for another reason than its own."""
    trace(name, RIGHT[name])
    if name == "grouped_glu":
        assert trace(name, RIGHT[name] | {"w_up": None}).shape == (8, 3)


@pytest.mark.parametrize(("name", "change", "error", "says"), WRONG, ids=str)
def test_wrong_operands(name, change, error, says):
    with pytest.raises(error, match=says):
        trace(name, RIGHT[name] | change)
