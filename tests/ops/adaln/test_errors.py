"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.adaln import Plan

T, D, B = 8, 6, 3
OFFSETS = np.array([0, 2, 5, 8], np.int32)


def shape(*sizes: int, dtype="float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


ADALN = {"x": shape(T, D), "scale": shape(B, D), "shift": shape(B, D), "sequence_offsets": OFFSETS}
GATED = {"residual": shape(T, D), "h": shape(T, D), "gate": shape(B, D), "sequence_offsets": OFFSETS}
BOTH = GATED | {"scale": shape(B, D), "shift": shape(B, D)}

SAME = dict.fromkeys(("scale", "shift"), shape(T, D)) | {"sequence_offsets": np.arange(T + 1, dtype=np.int32)}  # B = T

# What differs from the arguments above, the error, and what its message must name. Shapes become arrays.
ADALN_ERRORS = {
    "x-rank": ({"x": shape(2, T, D)}, ValueError, r"x has shape \(2, 8, 6\).*\[T, D\]"),
    "x-list": ({"x": [[1.0] * D] * T}, TypeError, r"x is a list.*\[T, D\]"),
    "x-int": ({"x": shape(T, D, dtype="int32")}, TypeError, r"x is int32.*bfloat16, float16, float32.*x\.astype"),
    "scale-int": ({"scale": shape(B, D, dtype="int8")}, TypeError, r"scale is int8.*scale\.astype"),
    "scale-columns": ({"scale": shape(B, D + 1)}, ValueError, r"D of scale.* is 7.*D of x is 6"),
    "shift-columns": ({"shift": shape(B, D - 1)}, ValueError, r"D of shift.* is 5.*D of x is 6"),
    "shift-rows": ({"shift": shape(T, D)}, ValueError,
     r"scale, shift have 3, 8 rows.*one for each sequence.*one for each row of x"),
    "rows": (dict.fromkeys(("scale", "shift"), shape(2, D)), ValueError,
     r"scale and shift have 2 rows; with 4 sequence_offsets.*B=3.*T=8"),
    "rows-no-offsets": ({"sequence_offsets": None}, ValueError,
     r"scale and shift have 3 rows; without sequence_offsets.*1 \(one sequence\) or T=8"),
    "offsets-rank": ({"sequence_offsets": OFFSETS[None]}, ValueError,
     r"sequence_offsets has shape \(1, 4\).*\(B \+ 1,\).*each sequence starts"),
    "offsets-int64": ({"sequence_offsets": OFFSETS.astype(np.int64)}, TypeError,
     r"sequence_offsets is int64.*sequence_offsets\.astype\(jnp\.int32\)"),
    "offsets-float": ({"sequence_offsets": OFFSETS.astype(np.float32)}, TypeError,
     r"sequence_offsets is float32.*astype\(jnp\.int32\)"),
    "offsets-list": ({"sequence_offsets": OFFSETS.tolist()}, TypeError,
     r"sequence_offsets is a list.*int32.*\(B \+ 1,\)"),
    "weight-columns": ({"weight": shape(D + 1)}, ValueError, r"len\(weight\) is 7.*D of x is 6"),
    "weight-int": ({"weight": shape(D, dtype="int32")}, TypeError, r"weight is int32.*weight\.astype"),
    "bias-columns": ({"bias": shape(1)}, ValueError, r"len\(bias\) is 1.*D of x is 6"),
    "per-missing": (SAME, ValueError,
     r"scale and shift have 8 rows.*as many sequences as rows of x \(B = T = 8\).*per='sequence'.*per='row'"),
    "per-row-of-sequences": ({"per": "row"}, ValueError,
     r"scale and shift have 3 rows; with 4 sequence_offsets and per='row' they must have T=8 \(one a row\)\."),
    "per-sequence-of-rows": (dict.fromkeys(("scale", "shift"), shape(T, D)) | {"per": "sequence"}, ValueError,
     r"scale and shift have 8 rows; with 4 sequence_offsets and per='sequence' they must have B=3 \(one"),
    "per-row-no-offsets": (
        dict.fromkeys(("scale", "shift"), shape(1, D)) | {"per": "row", "sequence_offsets": None},
        ValueError,
        r"scale and shift have 1 rows; without sequence_offsets and per='row' they must have T=8",
    ),
    "plan-and-backend": ({"backend": "pallas", "plan": Plan("xla")}, ValueError,
     r"backend='pallas' contradicts plan\.backend='xla'"),
}  # fmt: skip
GATED_ERRORS = {
    "residual-rank": ({"residual": shape(T)}, ValueError, r"residual has shape \(8,\).*\[T, D\]"),
    "h-int": ({"h": shape(T, D, dtype="int32")}, TypeError, r"h is int32.*h\.astype"),
    "h-shape": ({"h": shape(T + 1, D)}, ValueError, r"h has shape \(9, 6\).*that of residual, \(8, 6\)"),
    "gate-columns": ({"gate": shape(B, 1)}, ValueError, r"D of gate.* is 1.*D of residual is 6"),
    "gate-rows": ({"gate": shape(4, D)}, ValueError, r"gate have 4 rows; with 4 sequence_offsets.*B=3.*T=8"),
    "per-missing": ({"gate": shape(T, D), "sequence_offsets": SAME["sequence_offsets"]}, ValueError,
     r"gate have 8 rows.*B = T = 8.*per='row'"),
}  # fmt: skip
BOTH_ERRORS = {
    "rows": ({"gate": shape(T, D)}, ValueError, r"gate, scale, shift have 8, 3, 3 rows.*one for each row of residual"),
    "shift-columns": ({"shift": shape(B, 2)}, ValueError, r"D of shift.* is 2.*D of residual is 6"),
    "per-missing": ({**SAME, "gate": shape(T, D)}, ValueError, r"gate and scale and shift have 8 rows.*per='sequence'"),
    "per": ({"per": "row"}, ValueError, r"gate and scale and shift have 3 rows.*per='row' they must have T=8"),
}  # fmt: skip
FUNCTIONS = {
    "adaln": (jaxops.adaln, ADALN, ADALN_ERRORS),
    "gated": (jaxops.gated_residual, GATED, GATED_ERRORS),
    "both": (jaxops.gated_residual_adaln, BOTH, BOTH_ERRORS),
}
CASES = [
    pytest.param(fn, good, *case, id=f"{op}-{name}")
    for op, (fn, good, errors) in FUNCTIONS.items()
    for name, case in errors.items()
]


def split(arguments: dict) -> tuple[dict, dict]:
    """Arguments that are arrays, as shapes, and the rest."""
    arrays = {name: value for name, value in arguments.items() if isinstance(value, jax.ShapeDtypeStruct)}
    return arrays, {name: value for name, value in arguments.items() if name not in arrays}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_what_the_errors_differ_from_is_right(op):
    """Otherwise a case below could fail for another reason than its own."""
    fn, good, _ = FUNCTIONS[op]
    arrays, rest = split(good)
    out = jax.eval_shape(lambda arrays: fn(**arrays, **rest), arrays)
    assert [x.shape for x in jax.tree.leaves(out)] == [(T, D)] * (2 if op == "both" else 1)


@pytest.mark.parametrize(("fn", "good", "change", "error", "match"), CASES)
def test_error(fn, good, change, error, match):
    arrays, rest = split({**good, **change})
    with pytest.raises(error, match=match):
        fn(**{name: jnp.zeros(x.shape, x.dtype) for name, x in arrays.items()}, **rest)
    # eval_shape runs nothing: the error needs no device and no value.
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda arrays: fn(**arrays, **rest), arrays)
