"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.adaln import Plan, Tiles

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
    "x-float8": ({"x": shape(T, D, dtype="float8_e4m3fn")}, TypeError, r"x is float8_e4m3fn.*x\.astype"),
    "scale-rank": ({"scale": shape(D)}, ValueError, r"scale has shape \(6,\).*\[B, D\]"),
    "scale-int": ({"scale": shape(B, D, dtype="int8")}, TypeError, r"scale is int8.*scale\.astype"),
    "scale-columns": ({"scale": shape(B, D + 1)}, ValueError, r"D of scale.* is 7.*D of x is 6"),
    "shift-rank": ({"shift": shape(B, D, 1)}, ValueError, r"shift has shape \(3, 6, 1\).*\[B, D\]"),
    "shift-int": ({"shift": shape(B, D, dtype="uint8")}, TypeError, r"shift is uint8.*shift\.astype"),
    "shift-columns": ({"shift": shape(B, D - 1)}, ValueError, r"D of shift.* is 5.*D of x is 6"),
    "shift-rows": (
        {"shift": shape(T, D)},
        ValueError,
        r"scale, shift have 3, 8 rows.*one for each sequence.*one for each row of x",
    ),
    "rows": (
        dict.fromkeys(("scale", "shift"), shape(2, D)),
        ValueError,
        r"scale and shift have 2 rows; with 4 sequence_offsets.*B=3.*T=8",
    ),
    "rows-no-offsets": (
        {"sequence_offsets": None},
        ValueError,
        r"scale and shift have 3 rows; without sequence_offsets.*1 \(one sequence\) or T=8",
    ),
    "offsets-rank": (
        {"sequence_offsets": OFFSETS[None]},
        ValueError,
        r"sequence_offsets has shape \(1, 4\).*\(B \+ 1,\).*each sequence starts",
    ),
    "offsets-none": ({"sequence_offsets": OFFSETS[:0]}, ValueError, r"sequence_offsets has shape \(0,\).*\(B \+ 1,\)"),
    "offsets-int64": (
        {"sequence_offsets": OFFSETS.astype(np.int64)},
        TypeError,
        r"sequence_offsets is int64.*sequence_offsets\.astype\(jnp\.int32\)",
    ),
    "offsets-float": (
        {"sequence_offsets": OFFSETS.astype(np.float32)},
        TypeError,
        r"sequence_offsets is float32.*astype\(jnp\.int32\)",
    ),
    "offsets-list": (
        {"sequence_offsets": OFFSETS.tolist()},
        TypeError,
        r"sequence_offsets is a list.*int32.*\(B \+ 1,\)",
    ),
    "weight-rank": ({"weight": shape(1, D)}, ValueError, r"weight has shape \(1, 6\).*\[D\]"),
    "weight-columns": ({"weight": shape(D + 1)}, ValueError, r"len\(weight\) is 7.*D of x is 6"),
    "weight-int": ({"weight": shape(D, dtype="int32")}, TypeError, r"weight is int32.*weight\.astype"),
    "bias-rank": ({"bias": shape()}, ValueError, r"bias has shape \(\).*\[D\]"),
    "bias-columns": ({"bias": shape(1)}, ValueError, r"len\(bias\) is 1.*D of x is 6"),
    "bias-int": ({"bias": shape(D, dtype="int32")}, TypeError, r"bias is int32.*bias\.astype"),
    "norm": ({"norm": "batch"}, ValueError, "norm='batch'.*'layer', 'rms'"),
    "norm-none": ({"norm": None}, ValueError, "norm=None.*'layer', 'rms'"),
    "activation": ({"activation": "elu"}, ValueError, "activation='elu'.*None, 'silu', 'gelu', 'gelu_tanh', 'relu'"),
    "epsilon-negative": ({"epsilon": -1}, ValueError, r"epsilon is -1; it must be at least 0"),
    "epsilon-nan": ({"epsilon": float("nan")}, ValueError, r"epsilon is nan; it must be finite"),
    "epsilon-inf": ({"epsilon": float("inf")}, ValueError, r"epsilon is inf; it must be finite"),
    "epsilon-array": ({"epsilon": np.full(1, 1e-6)}, TypeError, r"epsilon is a ndarray; it must be a Python number"),
    "epsilon-none": ({"epsilon": None}, TypeError, r"epsilon is None; it must be a Python number"),
    "epsilon-bool": ({"epsilon": True}, TypeError, r"epsilon is a bool; it must be a Python number"),
    "per": ({"per": "token"}, ValueError, r"per='token': write None, 'sequence', 'row'"),
    "per-missing": (
        SAME,
        ValueError,
        r"scale and shift have 8 rows.*as many sequences as rows of x \(B = T = 8\).*per='sequence'.*per='row'",
    ),
    "per-row-of-sequences": (
        {"per": "row"},
        ValueError,
        r"scale and shift have 3 rows; with 4 sequence_offsets and per='row' they must have T=8 \(one a row\)\.",
    ),
    "per-sequence-of-rows": (
        dict.fromkeys(("scale", "shift"), shape(T, D)) | {"per": "sequence"},
        ValueError,
        r"scale and shift have 8 rows; with 4 sequence_offsets and per='sequence' they must have B=3 \(one",
    ),
    "per-row-no-offsets": (
        dict.fromkeys(("scale", "shift"), shape(1, D)) | {"per": "row", "sequence_offsets": None},
        ValueError,
        r"scale and shift have 1 rows; without sequence_offsets and per='row' they must have T=8",
    ),
    "out_dtype": (
        {"out_dtype": "int32"},
        TypeError,
        "out_dtype=int32.*bfloat16, float16, float32, float8_e4m3fn, float8_e5m2",
    ),
    "backend": ({"backend": "triton"}, ValueError, "backend='triton'.*'auto', 'pallas' or 'xla'"),
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
}
GATED_ERRORS = {
    "residual-rank": ({"residual": shape(T)}, ValueError, r"residual has shape \(8,\).*\[T, D\]"),
    "residual-int": ({"residual": shape(T, D, dtype="int32")}, TypeError, r"residual is int32.*residual\.astype"),
    "h-rank": ({"h": shape(T, D, 1)}, ValueError, r"h has shape \(8, 6, 1\).*\[T, D\]"),
    "h-int": ({"h": shape(T, D, dtype="int32")}, TypeError, r"h is int32.*h\.astype"),
    "h-shape": ({"h": shape(T + 1, D)}, ValueError, r"h has shape \(9, 6\).*that of residual, \(8, 6\)"),
    "gate-columns": ({"gate": shape(B, 1)}, ValueError, r"D of gate.* is 1.*D of residual is 6"),
    "gate-int": ({"gate": shape(B, D, dtype="int32")}, TypeError, r"gate is int32.*gate\.astype"),
    "gate-rows": ({"gate": shape(4, D)}, ValueError, r"gate have 4 rows; with 4 sequence_offsets.*B=3.*T=8"),
    "per": ({"per": 1}, ValueError, r"per=1: write None, 'sequence', 'row'"),
    "per-missing": (
        {"gate": shape(T, D), "sequence_offsets": SAME["sequence_offsets"]},
        ValueError,
        r"gate have 8 rows.*B = T = 8.*per='row'",
    ),
    "gate-rows-no-offsets": (
        {"sequence_offsets": None},
        ValueError,
        r"gate have 3 rows; without sequence_offsets.*T=8",
    ),
    "offsets-int64": (
        {"sequence_offsets": OFFSETS.astype(np.int64)},
        TypeError,
        r"sequence_offsets is int64.*astype\(jnp\.int32\)",
    ),
    "backend": ({"backend": "cuda"}, ValueError, "backend='cuda'.*'auto', 'pallas' or 'xla'"),
    "plan-and-backend": (
        {"backend": "xla", "plan": Plan("pallas")},
        ValueError,
        r"backend='xla' contradicts plan\.backend='pallas'",
    ),
}
BOTH_ERRORS = {
    "h-shape": ({"h": shape(D, T)}, ValueError, r"h has shape \(6, 8\).*that of residual, \(8, 6\)"),
    "rows": ({"gate": shape(T, D)}, ValueError, r"gate, scale, shift have 8, 3, 3 rows.*one for each row of residual"),
    "shift-columns": ({"shift": shape(B, 2)}, ValueError, r"D of shift.* is 2.*D of residual is 6"),
    "weight-columns": ({"weight": shape(T)}, ValueError, r"len\(weight\) is 8.*D of residual is 6"),
    "norm": ({"norm": "RMS"}, ValueError, "norm='RMS'.*'layer', 'rms'"),
    "activation": ({"activation": "tanh"}, ValueError, "activation='tanh'.*'silu'"),
    "epsilon": ({"epsilon": -1e-6}, ValueError, r"epsilon is -1e-06; it must be at least 0"),
    "per-missing": ({**SAME, "gate": shape(T, D)}, ValueError, r"gate and scale and shift have 8 rows.*per='sequence'"),
    "per": ({"per": "row"}, ValueError, r"gate and scale and shift have 3 rows.*per='row' they must have T=8"),
    "out_dtype": ({"out_dtype": "float64"}, TypeError, "out_dtype=float64.*float8_e4m3fn"),
    "plan-and-backend": (
        {"backend": "xla", "plan": Plan("pallas")},
        ValueError,
        r"backend='xla' contradicts plan\.backend='pallas'",
    ),
}
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


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rows": 12}, r"Tiles\.rows=12.*power of two"),
        ({"rows": 0}, r"Tiles\.rows=0.*power of two"),
        ({"step": 3}, r"Tiles\.step=3.*power of two"),
        ({"step": -1}, r"Tiles\.step=-1.*power of two"),
        ({"block": 100}, r"Tiles\.block=100.*power of two"),
        ({"block": 0}, r"Tiles\.block=0.*power of two"),
        ({"warps": 6}, r"Tiles\.warps=6.*power of two"),
        ({"warps": 64}, r"Tiles\.warps=64.*at most 32"),
        ({"step": 32}, r"Tiles\.step=32.*at most Tiles\.rows=16"),
    ],
    ids=str,
)
def test_rows_that_no_kernel_can_have(change, match):
    with pytest.raises(ValueError, match=match):
        Tiles(**{"rows": 16, "step": 1, "block": 128, "warps": 4, **change})
