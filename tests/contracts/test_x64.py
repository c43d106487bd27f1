"""Every op and layer under jax_enable_x64: the same results and gradients, of the same dtypes."""

import functools
import re
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
    """No float64 array in the program (Python's numbers are float64 scalars), and the same dtypes of results. A program
    that differs from the one without x64 is run and compared with the reference, unless a layer's, made of ops."""
    op = EVERYTHING[name]
    arguments, cotangents = small(op), cotangents_of(op)
    given = *parts(op, arguments), cotangents
    traced = jax.jit(functools.partial(everything, op, way)).trace(*given)
    jax.config.update("jax_enable_x64", False)
    plain = jax.jit(functools.partial(everything, op, way)).trace(*given)
    dtypes = [jax.tree.map(lambda x: x.dtype, t.out_info) for t in (traced, plain)]
    assert dtypes[0] == dtypes[1]
    text = str(traced.jaxpr)
    assert not re.search(r"f64\[\d", text)
    if text == str(plain.jaxpr) or name.startswith("nn."):
        return
    want = wanted(op, arguments, cotangents)
    jax.config.update("jax_enable_x64", True)
    check(op, way, traced.lower().compile()(*given), want)
