"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead.

Wrong arrays and options, one by one: tests/contracts.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxops
from jaxops import Quantized
from jaxops.ops import grouped_matmul
from jaxops.ops.moe_mlp import Plan, TileOrder
from tests.ops.permute.cases import Variant, make_routing

T, D, F, N, E = 5, 4, 6, 3, 3
ROUTING = make_routing(Variant(T=T, k=2, E=E))


def zeros(*sizes: int, dtype="float32"):
    return np.zeros(sizes, jnp.dtype(dtype))


def routing(**fields) -> dict:
    return {"routing": dataclasses.replace(ROUTING, **fields)}


GOOD = {
    "x": zeros(T, D),
    "w_gate": zeros(E, D, F),
    "w_up": zeros(E, D, F),
    "w_down": zeros(E, F, N),
    "routing": ROUTING,
}

SHAPES, TYPES, GAPS = ValueError, TypeError, NotImplementedError


def stored(*sizes: int, scaling: Any = "block_128x128") -> Quantized:
    quantize = functools.partial(jaxops.quantize, scaling=scaling, layouts="col")
    return jax.tree.map(lambda x: zeros(*x.shape, dtype=x.dtype), jax.eval_shape(quantize, zeros(*sizes)))


FP8 = {"recipe": "rowwise"}
JOINED = {"w_gate": zeros(E, D, 2 * F), "w_up": None}
STORED = {"w_gate": stored(E, D, F), "w_up": stored(E, D, F), "w_down": stored(E, F, N)}
# What differs from the arguments above, the error, and what its message must name.
ERRORS = [
    ({"w_gate": None, "w_up": None}, SHAPES, r"w_gate and w_up are None; pass both, or w_up alone"),
    ({"w_up": None}, SHAPES, r"w_down .*E, F = 3, 3, as w_gate, \[E, D, 2 F\] without w_up, is \(3, 4, 6\)"),
    (JOINED | {"w_gate": zeros(E, D, 7)}, SHAPES, r"w_gate has shape \(3, 4, 7\); without w_up .* an even number"),
    ({"w_gate": None, "w_up": zeros(E, D, 5)}, SHAPES, r"E, F = 3, 5, as w_up is \(3, 4, 5\)"),
    ({"w_gate": None, "activation": "swiglu_oai"}, SHAPES, "'swiglu_oai' is a unit of gate and up.*pass w_gate"),
    (
        {"biases": zeros(E, F)},
        TYPES,
        r"biases is .*; pass a tuple of a bias, or None, for each of w_gate, w_up, w_down",
    ),
    ({"biases": (None, None)}, TYPES, "biases is a tuple of 2; pass a tuple of a bias, or None, for each"),
    ({"biases": (zeros(E, N), None, None)}, SHAPES, r"bias of w_gate has shape \(3, 3\); it must be \(3, 6\)"),
    ({"biases": (None, None, zeros(E, F))}, SHAPES, r"bias of w_down has shape \(3, 6\); it must be \(3, 3\)"),
    ({"biases": (None, None, zeros(E, N, dtype="int32"))}, TYPES, "the bias of w_down is int32"),
    (JOINED | {"biases": (None, zeros(E, F), None)}, SHAPES, "biases has one for w_up, which is None: write None"),
    (FP8 | {"biases": (None, None, zeros(E, N))}, GAPS, "recipe='rowwise' has no biases: leave recipe out, or add"),
    (FP8 | JOINED, GAPS, r"recipe='rowwise' has kernels for .* two arrays only: pass w_gate\[\.\.\., :F\]"),
    (FP8 | {"w_gate": None}, GAPS, "recipe='rowwise' has .* two arrays only: pass w_gate and w_up"),
    (FP8 | {"activation": "swiglu_oai"}, GAPS, "recipe='rowwise' has no unit 'swiglu_oai': leave recipe out"),
    (STORED | {"activation": "swiglu_oai"}, GAPS, "Quantized weights have no unit 'swiglu_oai'"),
    (STORED | {"biases": (None, None, zeros(E, N))}, GAPS, "Quantized weights have no biases"),
    ({"w_up": zeros(E, D, F + 1)}, SHAPES, r"w_up has shape \(3, 4, 7\); it must be that of w_gate, \(3, 4, 6\)"),
    ({"w_up": zeros(E, D, F, dtype="bfloat16")}, TYPES, r"w_up is bfloat16 and w_gate is float32"),
    (
        {"w_down": zeros(E + 1, F, N)},
        SHAPES,
        r"w_down has shape \(4, 6, 3\); it must be \[E, F, N\] with E, F = 3, 6, as w_gate is \(3, 4, 6\)",
    ),
    ({"w_down": zeros(E, N, F)}, SHAPES, r"w_down has shape \(3, 3, 6\); it must be \[E, F, N\] with E, F = 3, 6"),
    ({"w_down": zeros(E, F, N, dtype="float16")}, TYPES, r"w_down is float16 and w_gate is float32"),
    ({"x": zeros(T, D + 1)}, SHAPES, r"D of x.* is 5.*D of w_gate \(3, 4, 6\) is 4"),
    ({"x": zeros(T + 1, D)}, SHAPES, r"x's number of rows is 6, but T of routing\.row_positions is 5"),
    ({"routing": tuple(vars(ROUTING).values())}, TYPES, r"routing is a tuple; pass the jaxops\.Routing"),
    (
        routing(group_offsets=jnp.zeros(3, jnp.int32)),
        SHAPES,
        r"len\(routing\.group_offsets\) is 3.*w_gate\.shape\[0\] \+ 1.* is 4",
    ),
    (routing(group_offsets=jnp.zeros(4)), TYPES, r"group_offsets is float32"),
    (
        routing(row_indices=jnp.zeros(9, jnp.int32)),
        SHAPES,
        r"row_indices has shape \(9,\); it must be \[T \* k\] = \(10,\)",
    ),
    (routing(weights=ROUTING.weights.T), SHAPES, r"routing\.weights has shape \(2, 5\).*\(5, 2\)"),
    (
        routing(weights=ROUTING.weights.astype(jnp.bfloat16)),
        TYPES,
        r"routing\.weights is bfloat16; write .*astype\(jnp\.float32\)",
    ),
    (
        {"x": zeros(T, D, dtype="bfloat16")},
        TYPES,
        r"x is bfloat16 and w_gate is float32.*compute_dtype=jnp\.bfloat16 \(the weights' gradients",
    ),
    ({"backend": "triton"}, GAPS, r"needs a Hopper GPU.*this is cpu"),
    ({"precision": lax.DotAlgorithmPreset.BF16_BF16_F32_X3}, GAPS, r"precision=BF16_BF16_F32_X3"),
    # With an FP8 recipe.
    (FP8 | {"recipe": "delayed"}, SHAPES, r"recipe='delayed': write 'tensorwise', "),
    (FP8 | {"precision": "highest"}, SHAPES, "precision is 'highest'; it must be None: recipe='rowwise' sets"),
    ({"pow2_scales": True}, SHAPES, "pow2_scales=True needs an FP8 recipe"),
    (FP8 | {"plan": Plan("xla", fused=TileOrder())}, SHAPES, "recipe='rowwise' has no kernel for the plan's fused"),
    (FP8 | {"plan": Plan("xla", gather=True)}, GAPS, r"unit_inside.* gathers rows: leave out gather"),
    (
        FP8 | {"plan": Plan("xla", down=grouped_matmul.Plan("xla"))},
        TYPES,
        r"plan is a jaxops\.ops\.grouped_matmul\.Plan",
    ),
    # With weights that are stored in FP8.
    (
        STORED | {"w_up": GOOD["w_up"]},
        TYPES,
        "w_up is .*array, w_down is a Quantized: pass three arrays",
    ),
    (STORED | FP8, SHAPES, "recipe='rowwise': with Quantized weights x is not quantized"),
    (STORED | {"precision": "highest"}, SHAPES, "precision is 'highest'; it must be None: Quantized weights set"),
    (
        STORED | {"w_down": stored(E, F, N, scaling="rowwise")},
        SHAPES,
        "w_down has rowwise .*block_128x128 scales",
    ),
    (STORED | {"w_up": Quantized(None, None, scaling="block_128x128")}, SHAPES, "w_up has neither a row nor a column"),
    (STORED | {"w_down": stored(E, N, F)}, SHAPES, r"w_down has shape .*it must be .*E, F, N"),
    (STORED | {"backend": "triton"}, GAPS, "quantize_lhs=False use 'pallas'"),
    (STORED | {"plan": Plan("xla", gather=True)}, GAPS, "backend='xla' has no kernel that gathers rows"),
    (STORED | {"plan": Plan("pallas", fused=TileOrder())}, SHAPES, "no kernel for the plan's fused"),
]


def test_what_the_errors_differ_from_is_right():
    """Otherwise a case below could fail for another reason than its own."""
    assert jax.eval_shape(lambda: jaxops.moe_mlp(**GOOD)).shape == (T, N)


@pytest.mark.parametrize(("change", "error", "match"), ERRORS, ids=[match[:24] for _, _, match in ERRORS])
def test_error(change, error, match):
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda: jaxops.moe_mlp(**GOOD | change))  # runs nothing: the error needs no device


def test_panels_that_no_kernel_can_have():
    with pytest.raises(SHAPES, match=r"TileOrder\.panel=0 must be at least 1"):
        TileOrder(0)
