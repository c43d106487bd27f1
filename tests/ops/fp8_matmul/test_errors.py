"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead."""

import jax
import pytest

import jaxops
from jaxops.ops.fp8_matmul import Plan, Tiles
from jaxops.ops.quantize import Quantized

M, K, N, G = 8, 4, 6, 3


def s(*shape, dtype="float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def q(*shape, scaling="block_128x128", layouts="both", dtype="float8_e4m3fn") -> Quantized:
    """What quantize returns for an array of that shape."""
    return jax.eval_shape(lambda x: jaxops.quantize(x, scaling=scaling, layouts=layouts, dtype=dtype), s(*shape))


DENSE = {"lhs": s(M, K), "rhs": s(K, N)}
GROUPED = {"lhs": s(M, K), "rhs": s(G, K, N), "group_offsets": s(G + 1, dtype="int32")}
SCALARS = (s(), s())

# What differs from the arguments above, the error, and what its message must name.
SHARED_ERRORS = {
    "recipe": ({"recipe": "mxfp8"}, ValueError, "recipe='mxfp8'.*'tensorwise'.*'blockwise_with_gw_hp'"),
    "out_dtype": ({"out_dtype": "int32"}, TypeError, "out_dtype=int32.*bfloat16, float16, float32"),
    "backend": ({"backend": "cublas"}, ValueError, "backend='cublas'.*'auto', 'triton', 'pallas' or 'xla'"),
    "plan-and-backend": (
        {"backend": "pallas", "plan": Plan("xla")},
        ValueError,
        r"backend='pallas' contradicts plan\.backend='xla'",
    ),
}
DENSE_ERRORS = SHARED_ERRORS | {
    "lhs-list": ({"lhs": [[1.0] * K] * M}, TypeError, r"lhs is a list.*\[\.\.\., K\]"),
    "lhs-int": (
        {"lhs": s(M, K, dtype="int8")},
        TypeError,
        r"lhs is int8.*bfloat16, float16, float32.*jaxops\.quantize",
    ),
    "lhs-float8": ({"lhs": s(M, K, dtype="float8_e4m3fn")}, TypeError, r"lhs is float8_e4m3fn.*jaxops\.quantize"),
    "lhs-scalar": ({"lhs": s()}, ValueError, r"lhs has shape \(\).*\[\.\.\., K\]"),
    "rhs-rank": ({"rhs": s(G, K, N)}, ValueError, r"rhs has shape \(3, 4, 6\).*\[K, N\]"),
    "rhs-int": ({"rhs": s(K, N, dtype="int8")}, TypeError, r"rhs is int8.*rhs\.astype"),
    "K": ({"lhs": s(M, K + 1)}, ValueError, r"K of lhs.* is 5.*K of rhs \(4, 6\) is 4"),
    "K-quantized": ({"rhs": q(K + 1, N)}, ValueError, r"K of lhs.* is 4.*K of rhs \(5, 6\) is 5"),
    "lhs-quantized-rank": (
        {"lhs": q(2, M, K, scaling="block_1x128")},
        ValueError,
        r"lhs has shape \(2, 8, 4\).*\[M, K\]",
    ),
    "lhs-quantized-scaling": ({"lhs": q(M, K)}, ValueError, "lhs has block_128x128 scales.*'blockwise'.*'block_1x128'"),
    "rhs-quantized-scaling": (
        {"rhs": q(K, N, scaling="rowwise")},
        ValueError,
        "rhs has rowwise scales.*recipe='blockwise'.*'block_128x128'",
    ),
    "rhs-no-column-layout": (
        {"rhs": q(K, N, scaling="rowwise", layouts="row"), "recipe": "rowwise"},
        ValueError,
        "no column layout, and rowwise scales.*layouts='both'",
    ),
    "rhs-empty": (
        {"rhs": Quantized(None, None, scaling="block_128x128")},
        ValueError,
        "rhs has neither a row nor a column layout",
    ),
    "cache-type": ({"rhs_quantized": s(K, N)}, TypeError, r"rhs_quantized is an array; .*jaxops\.quantize"),
    "cache-shape": ({"rhs_quantized": q(N, K)}, ValueError, r"rhs_quantized has shape \(6, 4\).*that of rhs, \(4, 6\)"),
    "cache-scaling": (
        {"rhs_quantized": q(K, N, scaling="tensorwise")},
        ValueError,
        "rhs_quantized has tensorwise scales.*'block_128x128'",
    ),
    "cache-of-quantized": (
        {"rhs": q(K, N), "rhs_quantized": q(K, N)},
        ValueError,
        "rhs is quantized already: omit rhs_quantized",
    ),
    "amax-unasked": ({"amax": SCALARS}, ValueError, "recipe='blockwise'.*only recipe='delayed' takes amax"),
    "amax-missing": ({"recipe": "delayed"}, ValueError, "recipe='delayed' needs amax"),
    "amax-one": ({"recipe": "delayed", "amax": s()}, ValueError, "recipe='delayed' needs amax=.*two float32 scalars"),
    "amax-shape": (
        {"recipe": "delayed", "amax": (s(), s(1))},
        TypeError,
        r"amax\[1\] \(of rhs\) is float32\[1\].*scalar",
    ),
    "amax-dtype": (
        {"recipe": "delayed", "amax": (s(dtype="bfloat16"), s())},
        TypeError,
        r"amax\[0\] \(of lhs\) is bfloat16\[\].*float32",
    ),
    "amax-float": (
        {"recipe": "delayed", "amax": (1.0, s())},
        TypeError,
        r"amax\[0\] \(of lhs\) is a float.*float32 scalar",
    ),
}
GROUPED_ERRORS = SHARED_ERRORS | {
    "delayed": ({"recipe": "delayed"}, ValueError, "recipe='delayed': write 'tensorwise'"),
    "lhs-rank": ({"lhs": s(2, M, K)}, ValueError, r"lhs has shape \(2, 8, 4\).*\[M, K\]"),
    "lhs-int": ({"lhs": s(M, K, dtype="int8")}, TypeError, r"lhs is int8.*lhs\.astype"),
    "rhs-rank": ({"rhs": s(K, N)}, ValueError, r"rhs has shape \(4, 6\).*\[G, K, N\]"),
    "K": ({"lhs": s(M, K + 1)}, ValueError, r"K of lhs.* is 5.*K of rhs \(3, 4, 6\) is 4"),
    "offsets-length": (
        {"group_offsets": s(G, dtype="int32")},
        ValueError,
        r"len\(group_offsets\) is 3.*3 groups need 4 offsets",
    ),
    "offsets-int64": (
        {"group_offsets": s(G + 1, dtype="uint32")},
        TypeError,
        r"group_offsets is uint32.*astype\(jnp\.int32\)",
    ),
    "cache-shape": (
        {"rhs_quantized": q(G, N, K)},
        ValueError,
        r"rhs_quantized has shape \(3, 6, 4\).*that of rhs, \(3, 4, 6\)",
    ),
}
CASES = [pytest.param(jaxops.fp8_matmul, DENSE, *case, id=f"dense-{name}") for name, case in DENSE_ERRORS.items()]
CASES += [
    pytest.param(jaxops.fp8_grouped_matmul, GROUPED, *case, id=f"grouped-{name}")
    for name, case in GROUPED_ERRORS.items()
]


def trace(fn, arguments: dict):
    """fn of arguments of which what has a shape is traced, and nothing is run."""
    leaves, tree = jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, (list, Plan)))
    shapes = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]

    def call(*arrays):
        arrays = iter(arrays)
        return fn(
            **jax.tree.unflatten(
                tree, [next(arrays) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
            )
        )

    return jax.eval_shape(call, *shapes)


@pytest.mark.parametrize(
    ("fn", "good"), [(jaxops.fp8_matmul, DENSE), (jaxops.fp8_grouped_matmul, GROUPED)], ids=["dense", "grouped"]
)
def test_what_the_errors_differ_from_is_right(fn, good):
    """Otherwise a case below could fail for another reason than its own."""
    assert trace(fn, good).shape == (M, N)


@pytest.mark.parametrize(("fn", "good", "change", "error", "match"), CASES)
def test_error(fn, good, change, error, match):
    with pytest.raises(error, match=match):
        trace(fn, {**good, **change})


@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_with_gw_hp"])
def test_no_weight_gradient_of_a_row_layout_alone(recipe):
    """At the forward already, where the call stands that must change."""
    x = q(M, K, scaling="block_1x128", layouts="row")
    match = "column layout" if recipe == "blockwise" else "'blockwise_with_gw_hp' multiplies the unquantized lhs"
    with pytest.raises(NotImplementedError, match=match):
        jax.eval_shape(lambda x, w: jax.vjp(lambda w: jaxops.fp8_matmul(x, w, recipe=recipe), w)[0], x, s(K, N))


def test_ragged_lhs_quantized_without_its_groups():
    x = q(M, K, scaling="block_1x128")
    with pytest.raises(NotImplementedError, match="group_offsets"):
        jax.eval_shape(
            lambda x, w, offsets: jax.vjp(lambda w: jaxops.fp8_grouped_matmul(x, w, offsets), w)[0],
            x, s(G, K, N), GROUPED["group_offsets"],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bm": 48}, r"Tiles\.bm=48.*power of two.*16"),
        ({"bn": 8}, r"Tiles\.bn=8.*power of two.*16"),
        ({"warps": 3}, r"Tiles\.warps=3.*power of two and at most 16"),
        ({"stages": 0}, r"Tiles\.stages=0.*at least 1"),
        ({"panel": 0}, r"Tiles\.panel=0.*at least 1"),
        ({"kernel": "cuda"}, r"Tiles\.kernel='cuda'.*'triton', 'pallas', 'xla'"),
    ],
    ids=str,
)
def test_tiles_that_no_kernel_can_have(change, match):
    with pytest.raises(ValueError, match=match):
        Tiles(**{"kernel": "pallas", "bm": 64, "bn": 64, **change})
