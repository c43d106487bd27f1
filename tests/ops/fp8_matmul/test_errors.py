"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead.

Wrong arrays and options, one by one: tests/contracts.
"""

import jax
import pytest

import jaxops
from jaxops.ops.fp8_matmul import Plan
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
SHAPES, TYPES = ValueError, TypeError

# What differs from the arguments above, the error, and what its message must name.
SHARED_ERRORS = [
    ({"recipe": "mxfp8"}, SHAPES, "recipe='mxfp8'.*'tensorwise'.*'blockwise_with_gw_hp'"),
    ({"backend": "pallas", "plan": Plan("xla")}, SHAPES, r"backend='pallas' contradicts plan\.backend='xla'"),
]
DENSE_ERRORS = [
    *SHARED_ERRORS,
    ({"lhs": s(M, K, dtype="float8_e4m3fn")}, TYPES, r"lhs is float8_e4m3fn.*jaxops\.quantize"),
    ({"lhs": s()}, SHAPES, r"lhs has shape \(\).*\[\.\.\., K\]"),
    ({"rhs": s(G, K, N)}, SHAPES, r"rhs has shape \(3, 4, 6\).*\[K, N\]"),
    ({"lhs": s(M, K + 1)}, SHAPES, r"K of lhs.* is 5.*K of rhs \(4, 6\) is 4"),
    ({"rhs": q(K + 1, N)}, SHAPES, r"K of lhs.* is 4.*K of rhs \(5, 6\) is 5"),
    ({"lhs": q(2, M, K, scaling="block_1x128")}, SHAPES, r"lhs has shape \(2, 8, 4\).*\[M, K\]"),
    ({"lhs": q(M, K)}, SHAPES, "lhs has block_128x128 scales.*'blockwise'.*'block_1x128'"),
    ({"rhs": q(K, N, scaling="rowwise")}, SHAPES, "rhs has rowwise scales.*recipe='blockwise'.*'block_128x128'"),
    (
        {"rhs": q(K, N, scaling="rowwise", layouts="row"), "recipe": "rowwise"},
        SHAPES,
        "no column layout, and rowwise scales.*layouts='both'",
    ),
    ({"rhs": Quantized(None, None, scaling="block_128x128")}, SHAPES, "rhs has neither a row nor a column layout"),
    ({"rhs_quantized": s(K, N)}, TYPES, r"rhs_quantized is an array; .*jaxops\.quantize"),
    ({"rhs_quantized": q(N, K)}, SHAPES, r"rhs_quantized has shape \(6, 4\).*that of rhs, \(4, 6\)"),
    ({"rhs_quantized": q(K, N, scaling="tensorwise")}, SHAPES, "rhs_quantized has tensorwise scales.*'block_128x128'"),
    ({"rhs": q(K, N), "rhs_quantized": q(K, N)}, SHAPES, "rhs is quantized already: omit rhs_quantized"),
    ({"amax": SCALARS}, SHAPES, "recipe='blockwise'.*only recipe='delayed' takes amax"),
    ({"recipe": "delayed"}, SHAPES, "recipe='delayed' needs amax"),
    *(
        ({"recipe": "delayed", "amax": amax}, SHAPES, "recipe='delayed' needs amax=.*two float32 scalars")
        for amax in (s(), (s(),))
    ),
    ({"recipe": "delayed", "amax": (s(), s(1))}, TYPES, r"amax\[1\] \(of rhs\) is float32\[1\].*scalar"),
    (
        {"recipe": "delayed", "amax": (s(dtype="bfloat16"), s())},
        TYPES,
        r"amax\[0\] \(of lhs\) is bfloat16\[\].*float32",
    ),
    ({"recipe": "delayed", "amax": (1.0, s())}, TYPES, r"amax\[0\] \(of lhs\) is a float.*float32 scalar"),
    *(
        ({"lhs": lhs, "rhs": rhs, "quantize_lhs": False}, SHAPES, "multiplies an array lhs by a quantized rhs")
        for lhs, rhs in ((s(M, K), s(K, N)), (q(M, K, scaling="block_1x128"), q(K, N)))
    ),
    ({"recipe": "delayed", "amax": SCALARS, "quantize_lhs": False}, SHAPES, "use recipe='tensorwise'"),
]
GROUPED_ERRORS = [
    *SHARED_ERRORS,
    ({"recipe": "delayed"}, SHAPES, "recipe='delayed': write 'tensorwise'"),
    ({"rhs": s(K, N)}, SHAPES, r"rhs has shape \(4, 6\).*\[G, K, N\]"),
    ({"lhs": s(M, K + 1)}, SHAPES, r"K of lhs.* is 5.*K of rhs \(3, 4, 6\) is 4"),
    ({"group_offsets": s(G, dtype="int32")}, SHAPES, r"len\(group_offsets\) is 3.*3 groups need 4 offsets"),
    ({"rhs_quantized": q(G, N, K)}, SHAPES, r"rhs_quantized has shape \(3, 6, 4\).*that of rhs, \(3, 4, 6\)"),
]
CASES = [(jaxops.fp8_matmul, DENSE, *case) for case in DENSE_ERRORS]
CASES += [(jaxops.fp8_grouped_matmul, GROUPED, *case) for case in GROUPED_ERRORS]


def trace(fn, arguments: dict):
    """fn of arguments of which what has a shape is traced, and nothing is run."""
    leaves, tree = jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, (list, Plan)))
    shapes = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]

    def call(*arrays):
        arrays = iter(arrays)
        given = [next(arrays) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
        return fn(**jax.tree.unflatten(tree, given))

    return jax.eval_shape(call, *shapes)


@pytest.mark.parametrize(
    ("fn", "good"), [(jaxops.fp8_matmul, DENSE), (jaxops.fp8_grouped_matmul, GROUPED)], ids=["dense", "grouped"]
)
def test_what_the_errors_differ_from_is_right(fn, good):
    """Otherwise a case below could fail for another reason than its own."""
    assert trace(fn, good).shape == (M, N)


@pytest.mark.parametrize(("fn", "good", "change", "error", "match"), CASES, ids=[case[-1][:24] for case in CASES])
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
