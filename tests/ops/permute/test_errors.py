"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.permute import Plan
from tests.ops.permute.cases import Variant, make_routing

VARIANT = Variant(T=5, k=2, E=3)
ROUTING = make_routing(VARIANT)
X, ROWS = np.zeros((5, 4), np.float32), np.zeros((10, 4), np.float32)
OPS = {
    "permute": lambda change: jaxops.permute(**{"x": X, "routing": ROUTING} | change),
    "combine": lambda change: jaxops.combine(**{"rows": ROWS, "routing": ROUTING} | change),
}


def changed(**fields) -> dict:
    return {"routing": dataclasses.replace(ROUTING, **fields)}


# What differs from the arguments above, the error, and what its message must name.
OF_BOTH = {
    "routing-dict": ({"routing": vars(ROUTING)}, TypeError, r"routing is a dict; pass the jaxops\.Routing"),
    "positions-rank": (changed(row_positions=jnp.zeros((1, 5, 2), jnp.int32)), ValueError,
     r"row_positions has shape \(1, 5, 2\).*\[T, k\].*jax\.vmap"),
    "positions-dtype": (changed(row_positions=ROUTING.row_positions.astype(jnp.float32)), TypeError,
     r"row_positions is float32; write .*astype\(jnp\.int32\)"),
    "positions-none": (changed(row_positions=None), TypeError,
     r"routing\.row_positions is None; pass the row_positions \[T, k\]"),
    "indices-size": (changed(row_indices=ROUTING.row_indices[1:]), ValueError,
     r"row_indices has shape \(9,\).*\[T \* k\] = \(10,\).*\(5, 2\)"),
    "indices-dtype": (changed(row_indices=ROUTING.row_indices.astype(jnp.int16)), TypeError, r"row_indices is int16"),
    "offsets-rank": (changed(group_offsets=jnp.zeros((1, 4), jnp.int32)), ValueError,
     r"group_offsets has shape \(1, 4\)"),
    "offsets-dtype": (changed(group_offsets=jnp.zeros(4)), TypeError, r"group_offsets is float32"),
    "plan-and-backend": ({"backend": "pallas", "plan": Plan("xla")}, ValueError,
     r"backend='pallas' contradicts plan\.backend='xla'"),
}  # fmt: skip
OF_ONE = {
    "x-rank": ("permute", {"x": X[None]}, ValueError, r"x has shape \(1, 5, 4\).*\[T, D\]"),
    "x-rows": ("permute", {"x": X[1:]}, ValueError, r"x's number of rows is 4, but T of routing\.row_positions is 5"),
    "x-int": ("permute", {"x": X.astype(np.int32)}, TypeError, r"x is int32.*x\.astype"),
    "rows-rank": ("combine", {"rows": ROWS[0]}, ValueError, r"rows has shape \(4,\).*\[T \* k, D\]"),
    "rows-rows": ("combine", {"rows": ROWS[1:]}, ValueError,
     r"the number of rows is 9, but T \* k of routing\.row_positions is 10"),
    "rows-list": ("combine", {"rows": ROWS.tolist()}, TypeError, r"rows is a list.*\[T \* k, D\]"),
    "weights-shape": ("combine", changed(weights=ROUTING.weights.T), ValueError,
     r"weights has shape \(2, 5\).*\(5, 2\)"),
    "weights-dtype": ("combine", changed(weights=ROUTING.weights.astype(jnp.bfloat16)), TypeError,
     r"weights is bfloat16; write .*astype\(jnp\.float32\)"),
}  # fmt: skip
ERRORS = {f"{op}-{name}": (op, *case) for name, case in OF_BOTH.items() for op in OPS} | OF_ONE


@pytest.mark.parametrize("op", OPS)
def test_what_the_errors_differ_from_is_right(op):
    """Otherwise a case below could fail for another reason than its own."""
    assert jax.eval_shape(lambda: OPS[op]({})).shape == {"permute": (10, 4), "combine": (5, 4)}[op]


@pytest.mark.parametrize(("op", "change", "error", "match"), ERRORS.values(), ids=ERRORS)
def test_error(op, change, error, match):
    with pytest.raises(error, match=match):
        OPS[op](change)
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda: OPS[op](change))  # runs nothing: the error needs no device


def test_too_many_rows():
    """Shapes only: nothing is allocated."""
    s = jax.ShapeDtypeStruct
    T, k = 1 << 28, 8
    routing = dataclasses.replace(ROUTING, row_positions=s((T, k), jnp.int32), row_indices=s((T * k,), jnp.int32))
    with pytest.raises(
        ValueError, match=r"268435456 tokens with 8 choices are 2147483648 rows.*fewer than 2\*\*31.*in parts"
    ):
        jaxops.permute(s((T, 1), jnp.bfloat16), routing)
