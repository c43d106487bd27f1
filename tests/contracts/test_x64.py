"""Every op and layer under jax_enable_x64: the same results and gradients, of the same dtypes."""

import functools
from collections.abc import Iterator

import jax
import pytest

from tests.contracts.run import EVERYTHING, cases, check, cotangents_of, everything, parts, small, wanted


@pytest.fixture
def x64() -> Iterator[None]:
    was = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", was)


@pytest.mark.parametrize(("name", "way"), cases(("xla", "interpret", "gpu")))
@pytest.mark.usefixtures("x64")
def test_x64(name, way):
    """Where a program is traced to the same operations as without, it computes the same; otherwise it is compiled and
    compared with the reference."""
    op = EVERYTHING[name]
    arguments, cotangents = small(op), cotangents_of(op)
    given = *parts(op, arguments), cotangents
    traced = jax.jit(functools.partial(everything, op, way)).trace(*given)
    jax.config.update("jax_enable_x64", False)
    plain = jax.jit(functools.partial(everything, op, way)).trace(*given)
    dtypes = [jax.tree.map(lambda x: x.dtype, t.out_info) for t in (traced, plain)]
    assert dtypes[0] == dtypes[1]
    if str(traced.jaxpr) == str(plain.jaxpr):
        return
    want = wanted(op, arguments, cotangents)
    jax.config.update("jax_enable_x64", True)
    check(op, way, traced.lower().compile()(*given), want)
