"""The arrays of every op: a list, another rank or dtype is an error that names the argument, before any launch."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from flax import nnx

from tests.contracts.run import EVERYTHING, is_float, small

# They take what JAX's own function takes, integers too; what is no matrix is flattened.
OTHER_RULES = "ragged_dot", "ragged_dot_general", "update_router_bias"
LEADING_AXES = "fp8_matmul", "lhs"
ARRAYS = [
    (op.name, name) for op in EVERYTHING.values() if not op.sharded and not op.name.startswith("nn.")
    for name, x in small(op).items() if isinstance(x, np.ndarray) and "." not in name
]  # fmt: skip
CASES = [case for case in ARRAYS if case[0] not in OTHER_RULES]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Stored:
    """A tensor that another library has quantized, as qwix's QArray: it has the tensor's shape and dtype."""

    qvalue: jax.Array
    scale: jax.Array

    shape = property(lambda self: self.qvalue.shape)
    ndim = property(lambda self: self.qvalue.ndim)
    dtype = property(lambda self: self.scale.dtype)


@pytest.mark.parametrize(("op", "argument"), ARRAYS, ids=lambda name: name)
def test_quantized_by_another_library(op, argument):
    entry = EVERYTHING[op]
    right = small(entry)
    stored = Stored(np.zeros(right[argument].shape, np.int8), np.ones(1, right[argument].dtype))
    for value in (stored, nnx.Param(stored)):
        with pytest.raises(TypeError, match=rf"\b{argument}\b is a Stored, a tree of several arrays.*dequantize it"):
            entry.call(right | {argument: value}, **entry.ways["xla"])


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
