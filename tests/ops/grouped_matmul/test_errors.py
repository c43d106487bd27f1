"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.grouped_matmul import Plan, Tiles

M, K, N, G = 8, 4, 6, 3
OFFSETS = np.array([0, 2, 5, 8], np.int32)


def shape(*sizes: int, dtype="float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


MATMUL = {"lhs": shape(M, K), "rhs": shape(G, K, N), "group_offsets": OFFSETS}
WGRAD = {"lhs": shape(M, K), "dout": shape(M, N), "group_offsets": OFFSETS}

# What differs from the arguments above, the error, and what its message must name. Shapes become arrays.
MATMUL_ERRORS = {
    "lhs-rank": ({"lhs": shape(2, M, K)}, ValueError, r"lhs has shape \(2, 8, 4\).*\[M, K\]"),
    "lhs-list": ({"lhs": [[1.0] * K] * M}, TypeError, r"lhs is a list.*\[M, K\]"),
    "lhs-int": (
        {"lhs": shape(M, K, dtype="int32")},
        TypeError,
        r"lhs is int32.*bfloat16, float16, float32.*lhs\.astype",
    ),
    "lhs-float8": ({"lhs": shape(M, K, dtype="float8_e4m3fn")}, TypeError, r"lhs is float8_e4m3fn.*lhs\.astype"),
    "rhs-rank": ({"rhs": shape(K, N)}, ValueError, r"rhs has shape \(4, 6\).*\[G, K, N\]"),
    "rhs-rank-transposed": (
        {"rhs": shape(N, K), "transpose_rhs": True},
        ValueError,
        r"rhs has shape \(6, 4\).*\[G, N, K\]",
    ),
    "rhs-int": ({"rhs": shape(G, K, N, dtype="int8")}, TypeError, r"rhs is int8.*rhs\.astype"),
    "K": ({"lhs": shape(M, K + 1)}, ValueError, r"K of lhs.* is 5.*K of rhs \(3, 4, 6\).* is 4"),
    "K-transposed": ({"transpose_rhs": True}, ValueError, r"K of lhs.* is 4.*K of rhs \(3, 4, 6\) \(transposed\) is 6"),
    "offsets-length": (
        {"group_offsets": OFFSETS[:-1]},
        ValueError,
        r"len\(group_offsets\) is 3; rhs\.shape\[0\] = 3 groups need 4 offsets: the cumulative sum.*a 0 before it",
    ),
    "offsets-rank": ({"group_offsets": OFFSETS[None]}, ValueError, r"group_offsets has shape \(1, 4\).*\(G \+ 1,\)"),
    "offsets-int64": (
        {"group_offsets": OFFSETS.astype(np.int64)},
        TypeError,
        r"group_offsets is int64.*group_offsets\.astype\(jnp\.int32\)",
    ),
    "offsets-uint32": (
        {"group_offsets": OFFSETS.astype(np.uint32)},
        TypeError,
        r"group_offsets is uint32.*astype\(jnp\.int32\)",
    ),
    "offsets-float": (
        {"group_offsets": OFFSETS.astype(np.float32)},
        TypeError,
        r"group_offsets is float32.*astype\(jnp\.int32\)",
    ),
    "offsets-list": ({"group_offsets": OFFSETS.tolist()}, TypeError, r"group_offsets is a list.*int32.*\(G \+ 1,\)"),
    "two-dtypes": (
        {"lhs": shape(M, K, dtype="bfloat16")},
        TypeError,
        r"lhs is bfloat16 and rhs is float32.*compute_dtype=jnp\.bfloat16",
    ),
    "bias-shape": ({"bias": shape(G, N + 1)}, ValueError, r"bias has shape \(3, 7\).*\[G, N\] = \(3, 6\)"),
    "bias-rank": ({"bias": shape(N)}, ValueError, r"bias has shape \(6,\).*\[G, N\]"),
    "bias-int": ({"bias": shape(G, N, dtype="int32")}, TypeError, r"bias is int32.*bias\.astype"),
    "compute_dtype": ({"compute_dtype": jnp.int8}, TypeError, "compute_dtype=int8.*bfloat16, float16, float32"),
    "out_dtype": ({"out_dtype": "int32"}, TypeError, "out_dtype=int32.*bfloat16, float16, float32"),
    "backend": ({"backend": "cuda"}, ValueError, "backend='cuda'.*'auto', 'triton', 'pallas' or 'xla'"),
    "backend-elsewhere": ({"backend": "triton"}, NotImplementedError, "needs a Hopper GPU.*this is cpu"),
    "plan-and-backend": (
        {"backend": "pallas", "plan": Plan("xla")},
        ValueError,
        r"backend='pallas' contradicts plan\.backend='xla'",
    ),
    "backend-and-plan": (
        {"backend": "xla", "plan": Plan("pallas")},
        ValueError,
        r"backend='xla' contradicts plan\.backend='pallas'",
    ),
    "precision-algorithm": ({"precision": "BF16_BF16_F32_X3"}, NotImplementedError, "BF16_BF16_F32_X3.*'highest'"),
    "precision-unknown": ({"precision": "exact"}, ValueError, "exact"),
}
WGRAD_ERRORS = {
    "lhs-rank": ({"lhs": shape(M)}, ValueError, r"lhs has shape \(8,\).*\[M, K\]"),
    "lhs-int": ({"lhs": shape(M, K, dtype="uint8")}, TypeError, r"lhs is uint8.*lhs\.astype"),
    "dout-rank": ({"dout": shape(G, M, N)}, ValueError, r"dout has shape \(3, 8, 6\).*\[M, N\]"),
    "dout-int": ({"dout": shape(M, N, dtype="int32")}, TypeError, r"dout is int32.*dout\.astype"),
    "M": ({"dout": shape(M + 1, N)}, ValueError, "M of dout.* is 9.*M of lhs is 8"),
    "offsets-none": ({"group_offsets": OFFSETS[:0]}, ValueError, r"group_offsets has shape \(0,\).*\(G \+ 1,\)"),
    "offsets-int64": (
        {"group_offsets": OFFSETS.astype(np.int64)},
        TypeError,
        r"group_offsets is int64.*astype\(jnp\.int32\)",
    ),
    "offsets-float": (
        {"group_offsets": OFFSETS.astype(np.float32)},
        TypeError,
        r"group_offsets is float32.*astype\(jnp\.int32\)",
    ),
    "two-dtypes": ({"dout": shape(M, N, dtype="float16")}, TypeError, "lhs is float32 and dout is float16.*cast"),
    "accumulate-shape": (
        {"accumulate_into": shape(G, N, K)},
        ValueError,
        r"accumulate_into has shape \(3, 6, 4\).*\[G, K, N\] = \(3, 4, 6\)",
    ),
    "accumulate-groups": (
        {"accumulate_into": shape(G + 1, K, N)},
        ValueError,
        r"accumulate_into has shape \(4, 4, 6\).*= \(3, 4, 6\)",
    ),
    "accumulate-rank": (
        {"accumulate_into": shape(K, N)},
        ValueError,
        r"accumulate_into has shape \(4, 6\).*\[G, K, N\]",
    ),
    "accumulate-int": (
        {"accumulate_into": shape(G, K, N, dtype="int32")},
        TypeError,
        r"accumulate_into is int32.*accumulate_into\.astype",
    ),
    "out_dtype-contradicts": (
        {"accumulate_into": shape(G, K, N), "out_dtype": jnp.bfloat16},
        TypeError,
        "out_dtype is bfloat16, but accumulate_into is float32.*leave out_dtype",
    ),
    "out_dtype": ({"out_dtype": "int32"}, TypeError, "out_dtype=int32.*bfloat16, float16, float32"),
    "backend": ({"backend": "cuda"}, ValueError, "backend='cuda'.*'auto', 'triton', 'pallas' or 'xla'"),
    "plan-and-backend": (
        {"backend": "xla", "plan": Plan("pallas")},
        ValueError,
        r"backend='xla' contradicts plan\.backend='pallas'",
    ),
    "precision-algorithm": ({"precision": "BF16_BF16_F32_X3"}, NotImplementedError, "BF16_BF16_F32_X3.*'highest'"),
}
CASES = [
    pytest.param(jaxops.grouped_matmul, MATMUL, *case, id=f"matmul-{name}") for name, case in MATMUL_ERRORS.items()
]
CASES += [pytest.param(jaxops.grouped_wgrad, WGRAD, *case, id=f"wgrad-{name}") for name, case in WGRAD_ERRORS.items()]


def split(arguments: dict) -> tuple[dict, dict]:
    """Arguments that are arrays, as shapes, and the rest."""
    arrays = {name: value for name, value in arguments.items() if isinstance(value, jax.ShapeDtypeStruct)}
    return arrays, {name: value for name, value in arguments.items() if name not in arrays}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((jaxops.grouped_matmul, MATMUL), id="matmul"),
        pytest.param((jaxops.grouped_wgrad, WGRAD), id="wgrad"),
    ],
)
def test_what_the_errors_differ_from_is_right(arguments):
    """Otherwise a case below could fail for another reason than its own."""
    fn, good = arguments
    arrays, rest = split(good)
    assert jax.eval_shape(lambda arrays: fn(**arrays, **rest), arrays).shape == (
        (M, N) if fn is jaxops.grouped_matmul else (G, K, N)
    )


@pytest.mark.parametrize(("fn", "good", "change", "error", "match"), CASES)
def test_error(fn, good, change, error, match):
    arrays, rest = split({**good, **change})
    with pytest.raises(error, match=match):
        fn(**{name: jnp.zeros(x.shape, x.dtype) for name, x in arrays.items()}, **rest)
    # eval_shape runs nothing: the error needs no device and no value.
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda arrays: fn(**arrays, **rest), arrays)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bm": 48}, r"Tiles\.bm=48.*power of two.*16"),
        ({"bn": 8}, r"Tiles\.bn=8.*power of two.*16"),
        ({"bk": 0}, r"Tiles\.bk=0.*power of two.*16"),
        ({"bk": -64}, r"Tiles\.bk=-64.*power of two.*16"),
        ({"warps": 3}, r"Tiles\.warps=3.*power of two and at most 16"),
        ({"stages": 0}, r"Tiles\.stages=0.*at least 1"),
        ({"panel": 0}, r"Tiles\.panel=0.*at least 1"),
    ],
    ids=str,
)
def test_tiles_that_no_kernel_can_have(change, match):
    with pytest.raises(ValueError, match=match):
        Tiles(**{"bm": 64, "bn": 64, "bk": 32, **change})
