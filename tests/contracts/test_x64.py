"""Every op and layer under jax_enable_x64: the same results and gradients, of the same dtypes."""

import functools
import re
from typing import Any

import jax
import pytest

from tests.configured import configured
from tests.contracts.run import EVERYTHING, cases, check, cotangents_of, everything, parts, small, wanted
from tests.jaxprs import operations


def given(name: str) -> tuple:
    op = EVERYTHING[name]
    return *parts(op, small(op)), cotangents_of(op)


@functools.cache
def traced(name: str, way: str, *, wide: bool) -> Any:
    """All of the op, with jax_enable_x64 or without."""
    arguments = given(name)
    with configured(jax_enable_x64=wide):
        return jax.jit(functools.partial(everything, EVERYTHING[name], way)).trace(*arguments)


@pytest.mark.parametrize(("name", "way"), cases(("xla", "interpret", "gpu")))
def test_dtypes(name, way):
    """No float64 array in the program (Python's numbers are float64 scalars), and the same dtypes of results."""
    wide, plain = (traced(name, way, wide=wide) for wide in (True, False))
    dtypes = [jax.tree.map(lambda x: x.dtype, t.out_info) for t in (wide, plain)]
    assert dtypes[0] == dtypes[1]
    assert not re.search(r"f64\[\d", str(wide.jaxpr))


@pytest.mark.parametrize(
    ("name", "way"), cases(("xla", "interpret", "gpu"), where=lambda op, way: not op.name.startswith("nn."))
)
def test_values(name, way):
    """A program that is another one than without x64, beside its Python numbers, is run and compared with the
    reference; on a GPU every one that differs, as it is compiled there. Layers consist of ops."""
    op = EVERYTHING[name]
    wide, plain = (traced(name, way, wide=wide) for wide in (True, False))
    computed, in_64_bits = operations(wide.jaxpr)
    if way != "gpu" and not in_64_bits and computed == operations(plain.jaxpr)[0]:
        return
    held, others, cotangents = given(name)
    want = wanted(op, held | others, cotangents)
    with configured(jax_enable_x64=True):
        check(op, way, wide.lower().compile()(held, others, cotangents), want)
