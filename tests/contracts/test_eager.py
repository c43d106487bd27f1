"""Ops with numpy arrays and without jit, layers under jit: results, all gradients, values outside, recompilation."""

import jax
import numpy as np
import pytest

from tests.compilations import compilations
from tests.contracts.run import (
    EVERYTHING,
    bits,
    cases,
    check,
    check_outside,
    cotangents_of,
    run,
    small,
    spoiled,
    wanted,
)

pytestmark = pytest.mark.versions


# What calls the backends is one code for all of them: interpreted kernels have the rest in test_transforms.py.
@pytest.mark.parametrize(("name", "way"), cases(("xla", "gpu", "triton")))
def test_results_and_gradients(name, way):
    """As the reference, the same bits twice, with NaN in all that must not be read; new values compile nothing."""
    op = EVERYTHING[name]
    arguments, cotangents = small(op), cotangents_of(op)
    results, gradients = run(op, way, arguments, cotangents)
    assert all(x.dtype.itemsize <= 4 for x in jax.tree.leaves((results, gradients)))
    check(op, way, (results, gradients), wanted(op, arguments, cotangents))
    if op.wrt and not op.sharded:
        jax.block_until_ready(op.call(arguments, **op.ways[way]))  # without gradients
    with compilations() as compiled:
        if op.wrt and not op.sharded:
            jax.block_until_ready(op.call(arguments, **op.ways[way]))
        again = run(op, way, arguments, cotangents)
        run(op, way, small(op, 1), cotangents_of(op, 1))
        spoilt = run(op, way, *spoiled(op, arguments, cotangents))
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves((results, gradients)), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))
    check_outside(op, arguments, results, gradients, spoilt)
    assert not compiled, f"calls after the first one compile {dict(compiled)}"
