"""Every op and layer under jax_default_matmul_precision."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.configured import configured
from tests.contracts.entry import Op
from tests.contracts.run import EVERYTHING, cases, cotangents_of, everything, is_float, parts, small
from tests.contracts.test_x64 import traced
from tests.jaxprs import same_operations


def under(precision: str) -> contextlib.AbstractContextManager:
    return configured(jax_default_matmul_precision=precision)


def error(got, want) -> float:
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    return (
        float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))
        if want.any()
        else float(np.abs(got).max(initial=0))
    )


def product_error(precision: str) -> float:
    """The error of x @ w. A CPU multiplies in float32; BF16_BF16_F32 is the product of operands rounded to bfloat16."""
    x, w = (np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32) for seed in (0, 1))
    kind = jnp.bfloat16 if precision == "BF16_BF16_F32" else jnp.float32
    return error(x.astype(kind).astype(np.float32) @ w.astype(kind).astype(np.float32), x.astype(np.float64) @ w)


def multiplies(op: Op, way: str) -> bool:
    return op.multiplies


def is_compared(op: Op, way: str) -> bool:
    """Kernels with products are lowered, in test_costs.py."""
    return way == "xla" or not op.multiplies


CASES = {
    "BF16_BF16_F32": cases(("xla", "interpret"), where=is_compared),
    "highest": cases(("xla", "interpret"), where=multiplies),
}


@pytest.mark.parametrize(
    ("precision", "name", "way"),
    [pytest.param(how, *case.values, id=f"{how}-{case.id}") for how in CASES for case in CASES[how]],
)
def test_precision(precision, name, way):
    """As precise as x @ w under it, times the few products in a chain. An op without products is the same program.
    "highest" gives the same program as precision="highest", which the other tests pass."""
    op = EVERYTHING[name]
    how = {key: value for key, value in op.ways[way].items() if key != "precision"}
    arguments, cotangents = small(op), cotangents_of(op)
    given = *parts(op, arguments), cotangents
    if precision == "highest" or not op.multiplies:
        with under(precision):
            found = jax.jit(functools.partial(everything, op, way, how=how)).trace(*given)
            same = jax.jit(functools.partial(everything, op, way)).trace(*given) if op.multiplies else None
        same = same or traced(name, way, wide=False)
        assert same_operations(found, same)
        return
    # Results alone: the backward's products are the same ones, the other way round.
    with under("highest"):
        want = op.expected(arguments, cotangents)[0] if op.expected else jax.jit(op.reference)(arguments)
    with under(precision):
        got = jax.jit(functools.partial(op.call, **how))(arguments)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if is_float(g):
            assert error(g, w) <= 8 * product_error(precision)
