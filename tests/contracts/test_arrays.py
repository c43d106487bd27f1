"""The arrays of every op: a list, another rank or dtype is an error that names the argument, before any launch."""

import re

import jax
import numpy as np
import pytest

from tests.contracts.run import EVERYTHING, is_float, small

# They take what JAX's own function takes, integers too; what is no matrix is flattened.
OTHER_RULES = "ragged_dot", "ragged_dot_general", "update_router_bias"
LEADING_AXES = "fp8_matmul", "lhs"
CASES = [
    (op.name, name) for op in EVERYTHING.values()
    if op.name not in OTHER_RULES and not op.sharded and not op.name.startswith("nn.")
    for name, x in small(op).items() if isinstance(x, np.ndarray) and "." not in name
]  # fmt: skip


@pytest.mark.parametrize(("op", "argument"), CASES, ids=lambda name: name)
def test_wrong_arrays(op, argument):
    entry = EVERYTHING[op]
    right = small(entry)
    x = right[argument]
    other_dtypes = ["int32", "float8_e4m3fn"] if is_float(x) else ["float32", "int64"]

    def refused(value, error: type | tuple, says: str) -> None:
        with pytest.raises(error, match=rf"\b{argument}\b.*{says}"):
            jax.eval_shape(lambda: entry.call(right | {argument: value}, **entry.ways["xla"]))

    refused(x.tolist(), TypeError, "is a list")
    if (op, argument) != LEADING_AXES:
        refused(x[None], ValueError, re.escape(str((1, *x.shape))))
    for dtype in other_dtypes:
        refused(x.astype(jax.numpy.dtype(dtype)), TypeError, dtype)
