"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.grouped_matmul import Plan

OFFSETS = np.array([0, 2, 5, 8], np.int32)


def shape(*sizes: int, dtype="float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


FIRST, SECOND = shape(1, 4, 6), shape(2, 3, 8)
GOOD = {"lhs": shape(8, 4), "rhs": (FIRST, SECOND), "group_offsets": OFFSETS}
ERRORS = {
    "lhs-rank": ({"lhs": shape(2, 8, 4)}, ValueError, r"lhs has shape \(2, 8, 4\).*\[M, K\]"),
    "lhs-int": ({"lhs": shape(8, 4, dtype="int32")}, TypeError, r"lhs is int32.*lhs\.astype"),
    "rhs-one-array": (
        {"rhs": FIRST},
        TypeError,
        r"rhs is an array; pass a tuple of one array \[G, K, N\] a modality.*jaxops\.grouped_matmul",
    ),
    "rhs-empty": ({"rhs": ()}, ValueError, r"rhs is empty; pass a tuple of one array \[G, K, N\] a modality"),
    "rhs-rank": ({"rhs": (FIRST, shape(3, 8))}, ValueError, r"rhs\[1\] has shape \(3, 8\).*\[G, K, N\]"),
    "rhs-rank-transposed": (
        {"rhs": (shape(4, 6), SECOND), "transpose_rhs": True},
        ValueError,
        r"rhs\[0\] has shape \(4, 6\).*\[G, N, K\]",
    ),
    "rhs-int": ({"rhs": (FIRST, shape(2, 3, 8, dtype="int8"))}, TypeError, r"rhs\[1\] is int8"),
    "rhs-dtypes": (
        {"rhs": (FIRST, shape(2, 3, 8, dtype="bfloat16"))},
        TypeError,
        r"rhs\[0\] is float32 and rhs\[1\] is bfloat16.*one dtype",
    ),
    "two-dtypes": (
        {"lhs": shape(8, 4, dtype="bfloat16")},
        TypeError,
        r"lhs is bfloat16 and rhs is float32.*compute_dtype=jnp\.bfloat16 \(the gradients of rhs",
    ),
    "K-narrow": (
        {"lhs": shape(8, 3)},
        ValueError,
        r"K of lhs.* is 3.*the largest K of rhs \[\(1, 4, 6\), \(2, 3, 8\)\] is 4",
    ),
    "K-wide": ({"lhs": shape(8, 5)}, ValueError, r"K of lhs.* is 5.*the largest K of rhs.* is 4"),
    "K-transposed": ({"transpose_rhs": True}, ValueError, r"K of lhs.* is 4.*the largest K of rhs.* is 8"),
    "offsets-length": (
        {"group_offsets": OFFSETS[:-1]},
        ValueError,
        r"len\(group_offsets\) is 3; the sum of all rhs\[i\]\.shape\[0\] = 3 groups need 4 offsets",
    ),
    "offsets-rank": ({"group_offsets": OFFSETS[None]}, ValueError, r"group_offsets has shape \(1, 4\)"),
    "offsets-int64": (
        {"group_offsets": OFFSETS.astype(np.int64)},
        TypeError,
        r"group_offsets is int64.*group_offsets\.astype\(jnp\.int32\)",
    ),
    "compute_dtype": ({"compute_dtype": jnp.int8}, TypeError, "compute_dtype=int8.*bfloat16, float16, float32"),
    "out_dtype": ({"out_dtype": "int32"}, TypeError, "out_dtype=int32.*bfloat16, float16, float32"),
    "backend": ({"backend": "cuda"}, ValueError, "backend='cuda'.*'auto', 'triton', 'pallas' or 'xla'"),
    "backend-elsewhere": ({"backend": "triton"}, NotImplementedError, "needs a Hopper GPU.*this is cpu"),
    "plan-and-backend": (
        {"backend": "pallas", "plan": Plan("xla")},
        ValueError,
        r"backend='pallas' contradicts plan\.backend='xla'",
    ),
    "plan-of-another-number": (
        {"plan": (Plan("xla"),)},
        ValueError,
        r"plan has 1 plans; rhs has 2 modalities: write one Plan for each, or one for all",
    ),
    "plans-of-two-backends": (
        {"plan": (Plan("xla"), Plan("pallas"))},
        ValueError,
        "backends pallas, xla.*the same one",
    ),
    "precision-algorithm": ({"precision": "BF16_BF16_F32_X3"}, NotImplementedError, "BF16_BF16_F32_X3.*'highest'"),
}


def split(arguments: dict) -> tuple[dict, dict]:
    """Arguments that are arrays, as shapes, and the rest."""
    arrays = {
        name: value for name, value in arguments.items() if name in ("lhs", "rhs") and not isinstance(value, np.ndarray)
    }
    return arrays, {name: value for name, value in arguments.items() if name not in arrays}


def test_what_the_errors_differ_from_is_right():
    """Otherwise a case below could fail for another reason than its own."""
    arrays, rest = split(GOOD)
    for given in (GOOD["rhs"], list(GOOD["rhs"])):
        assert jax.eval_shape(
            lambda arrays: jaxops.modality_grouped_matmul(**arrays, **rest), {**arrays, "rhs": given}
        ).shape == (8, 8)


@pytest.mark.parametrize(("change", "error", "match"), ERRORS.values(), ids=ERRORS)
def test_error(change, error, match):
    """eval_shape runs nothing: the error needs no device and no value."""
    arrays, rest = split({**GOOD, **change})
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda arrays: jaxops.modality_grouped_matmul(**arrays, **rest), arrays)


def test_forward_mode_is_refused():
    lhs, rhs = jnp.ones((8, 4)), (jnp.ones((1, 4, 6)), jnp.ones((2, 3, 8)))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda lhs: jaxops.modality_grouped_matmul(lhs, rhs, OFFSETS), (lhs,), (lhs,))
