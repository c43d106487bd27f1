"""Every op and layer under jax_enable_x64: the same results and gradients, of the same dtypes."""

import functools
import re
from collections.abc import Iterator

import jax
import pytest

from tests.contracts.run import EVERYTHING, ON_A_GPU, cases, check, cotangents_of, everything, parts, small, wanted


def with_scalars_of_32_bits(jaxpr: str) -> str:
    return re.sub(r"\b([iuf])64\[\]", r"\g<1>32[]", jaxpr)


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
    that is the one without x64 except for the width of scalars is lowered alone. Another one is run and compared with
    the reference, unless a layer's, made of ops; and on a GPU all of them."""
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
    scalars_alone = with_scalars_of_32_bits(text) == with_scalars_of_32_bits(str(plain.jaxpr))
    want = None if scalars_alone and way not in ON_A_GPU else wanted(op, arguments, cotangents)
    jax.config.update("jax_enable_x64", True)
    lowered = traced.lower()
    if want is not None:
        check(op, way, lowered.compile()(*given), want)
