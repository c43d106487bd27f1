"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxops
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

# What differs from the arguments above, the error, and what its message must name.
ERRORS = {
    "x-rank": ({"x": zeros(2, T, D)}, ValueError, r"x has shape \(2, 5, 4\).*\[T, D\]"),
    "x-list": ({"x": [[1.0] * D] * T}, TypeError, r"x is a list.*\[T, D\]"),
    "pieces-routing": ({"x": (zeros(T, D),)}, TypeError, r"x is a tuple and routing is a Routing.*a Routing a piece"),
    "pieces-none": ({"x": (), "routing": ()}, ValueError, r"x is an empty tuple"),
    "pieces-more": ({"x": (zeros(T, D),), "routing": 2 * (ROUTING,)}, ValueError, r"len\(routing\)"),
    "x-int": ({"x": zeros(T, D, dtype="int32")}, TypeError, r"x is int32.*bfloat16, float16, float32.*x\.astype"),
    "w_gate-rank": ({"w_gate": zeros(D, F)}, ValueError, r"w_gate has shape \(4, 6\).*\[E, D, F\]"),
    "w_gate-int": ({"w_gate": zeros(E, D, F, dtype="int8")}, TypeError, r"w_gate is int8.*w_gate\.astype"),
    "w_up-rank": ({"w_up": zeros(D, F)}, ValueError, r"w_up has shape \(4, 6\).*\[E, D, F\]"),
    "w_up-none": ({"w_up": None}, TypeError, r"w_up is None.*\[E, D, F\]"),
    "w_up-shape": (
        {"w_up": zeros(E, D, F + 1)},
        ValueError,
        r"w_up has shape \(3, 4, 7\); it must be that of w_gate, \(3, 4, 6\)",
    ),
    "w_up-dtype": ({"w_up": zeros(E, D, F, dtype="bfloat16")}, TypeError, r"w_up is bfloat16 and w_gate is float32"),
    "w_down-rank": ({"w_down": zeros(F, N)}, ValueError, r"w_down has shape \(6, 3\).*\[E, F, N\]"),
    "w_down-E": (
        {"w_down": zeros(E + 1, F, N)},
        ValueError,
        r"w_down has shape \(4, 6, 3\); it must be \[E, F, N\] with E, F = 3, 6, as w_gate is \(3, 4, 6\)",
    ),
    "w_down-transposed": (
        {"w_down": zeros(E, N, F)},
        ValueError,
        r"w_down has shape \(3, 3, 6\); it must be \[E, F, N\] with E, F = 3, 6",
    ),
    "w_down-dtype": (
        {"w_down": zeros(E, F, N, dtype="float16")},
        TypeError,
        r"w_down is float16 and w_gate is float32",
    ),
    "D": ({"x": zeros(T, D + 1)}, ValueError, r"D of x.* is 5.*D of w_gate \(3, 4, 6\) is 4"),
    "x-rows": ({"x": zeros(T + 1, D)}, ValueError, r"x's number of rows is 6, but T of routing\.row_positions is 5"),
    "routing-tuple": (
        {"routing": tuple(vars(ROUTING).values())},
        TypeError,
        r"routing is a tuple; pass the jaxops\.Routing",
    ),
    "routing-experts": (
        routing(group_offsets=jnp.zeros(3, jnp.int32)),
        ValueError,
        r"len\(routing\.group_offsets\) is 3.*w_gate\.shape\[0\] \+ 1.* is 4",
    ),
    "routing-offsets-rank": (
        routing(group_offsets=jnp.zeros((1, 4), jnp.int32)),
        ValueError,
        r"group_offsets has shape \(1, 4\)",
    ),
    "routing-offsets-dtype": (routing(group_offsets=jnp.zeros(4)), TypeError, r"group_offsets is float32"),
    "routing-positions-rank": (
        routing(row_positions=jnp.zeros(10, jnp.int32)),
        ValueError,
        r"row_positions has shape \(10,\); it must be \[T, k\].*vmap",
    ),
    "routing-positions-list": (routing(row_positions=[[0, 1]] * T), TypeError, r"routing\.row_positions is a list"),
    "routing-indices": (
        routing(row_indices=jnp.zeros(9, jnp.int32)),
        ValueError,
        r"row_indices has shape \(9,\); it must be \[T \* k\] = \(10,\)",
    ),
    "routing-weights-shape": (
        routing(weights=ROUTING.weights.T),
        ValueError,
        r"routing\.weights has shape \(2, 5\).*\(5, 2\)",
    ),
    "routing-weights-dtype": (
        routing(weights=ROUTING.weights.astype(jnp.bfloat16)),
        TypeError,
        r"routing\.weights is bfloat16; write .*astype\(jnp\.float32\)",
    ),
    "routing-weights-none": (routing(weights=None), TypeError, r"routing\.weights is None"),
    "two-dtypes": (
        {"x": zeros(T, D, dtype="bfloat16")},
        TypeError,
        r"x is bfloat16 and w_gate is float32.*compute_dtype=jnp\.bfloat16 \(the weights' gradients",
    ),
    "compute_dtype": ({"compute_dtype": jnp.int8}, TypeError, r"compute_dtype=int8.*bfloat16, float16, float32"),
    "out_dtype": ({"out_dtype": jnp.float8_e4m3fn}, TypeError, r"out_dtype=float8_e4m3fn.*bfloat16, float16, float32"),
    "activation": (
        {"activation": "swiglu"},
        ValueError,
        r"activation='swiglu': write 'silu', 'gelu', 'gelu_tanh', 'relu', 'sigmoid'",
    ),
    "save": ({"save": "all"}, ValueError, r"save='all': write 'preactivations', 'nothing'"),
    "backend": ({"backend": "cublas"}, ValueError, r"backend='cublas'.*'auto', 'triton', 'pallas' or 'xla'"),
    "triton": ({"backend": "triton"}, NotImplementedError, r"needs a Hopper GPU.*this is cpu"),
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
    assert jax.eval_shape(lambda: jaxops.moe_mlp(**GOOD)).shape == (T, N)


@pytest.mark.parametrize(("change", "error", "match"), ERRORS.values(), ids=ERRORS)
def test_error(change, error, match):
    with pytest.raises(error, match=match):
        jaxops.moe_mlp(**GOOD | change)
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda: jaxops.moe_mlp(**GOOD | change))  # runs nothing: the error needs no device


def test_panels_that_no_kernel_can_have():
    with pytest.raises(ValueError, match=r"TileOrder\.panel=0 must be at least 1"):
        TileOrder(0)
