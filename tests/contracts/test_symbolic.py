"""`jax.export` with a symbolic number of rows: one program for every length, or an error that says what to write."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.ops import OPS
from tests.contracts.run import EVERYTHING, check, cotangents_of, everything, is_float, parts, small

pytestmark = pytest.mark.versions

# The size of each op that is its number of rows. The others take a number; so do the ops with FP8 results.
ROWS = {
    "adaln": "T", "gated_residual": "T", "gated_residual_adaln": "T", "packed_attention": "T", "permute": "T",
    "combine": "T", "moe_mlp": "T", "route": "T", "route_choices": "T", "grouped_matmul": "M", "grouped_wgrad": "M",
    "ragged_dot": "M", "ragged_dot_general": "M", "modality_grouped_matmul": "M", "grouped_glu": "M",
    "linear_cross_entropy": "T",
}  # fmt: skip
NONE = {"quantize": "M", "fp8_matmul": "M", "fp8_grouped_matmul": "M", "cached_attention": "B"}
APART = {"dequantize", "update_router_bias", "all_gather_matmul", "matmul_reduce_scatter"}  # without rows, or a mesh's


def shapes_of(op, rows: str):
    """(those that have gradients, the others, cotangents)"""
    (size,) = jax.export.symbolic_shape("rows")
    given = op.shapes(op.sizes | {rows: size})
    results = jax.eval_shape(functools.partial(op.call, **op.ways["xla"]), given)
    return *parts(op, given), [x for x in jax.tree.leaves(results) if is_float(x)] if op.wrt else []


def test_every_op_is_here():
    assert {op.name for op in OPS} == ROWS.keys() | NONE.keys() | APART


@pytest.mark.parametrize("name", ROWS)
def test_one_program(name):
    """Of a number of rows that no entry has: results and gradients are those of this number by itself."""
    op, rows = EVERYTHING[name], ROWS[name]
    step = jax.jit(functools.partial(everything, op, "xla"))
    exported = jax.export.export(step)(*shapes_of(op, rows))
    arguments, cotangents = small(op, **{rows: 150}), cotangents_of(op, **{rows: 150})
    given = *parts(op, jax.tree.map(jnp.asarray, arguments)), [*map(jnp.asarray, cotangents)]
    got, want = (jax.tree.map(np.asarray, f(*given)) for f in (exported.call, step))
    check(op, "xla", got, want)


@pytest.mark.parametrize("name", [name for name in (*ROWS, *NONE) if EVERYTHING[name].pallas])
def test_kernels_need_a_number(name):
    op, rows = EVERYTHING[name], (ROWS | NONE)[name]
    (size,) = jax.export.symbolic_shape("rows")
    given = op.shapes(op.sizes | {rows: size})
    says = "is symbolic; .*(backend='xla', or once for each length|needs a number: export once for each size)"
    for how in ({"backend": "pallas"}, *([{}] if name in NONE else [])):
        with pytest.raises(NotImplementedError, match=says):
            jax.eval_shape(functools.partial(op.call, **how), given)
