"""Every op and layer with sizes of 0 and 1."""

import functools
import itertools

import jax
import numpy as np
import pytest

from tests.contracts.entry import Op
from tests.contracts.run import EVERYTHING, cases, check, cotangents_of, everything, parts, small, wanted_of_each
from tests.jaxprs import same_program


def changes(op: Op) -> list[dict[str, int]]:
    """Each size 0; and all sizes 1: the ops' own tests draw others at random."""
    return [*({size: 0} for size in op.sizes), dict.fromkeys(op.sizes, 1)]


@functools.cache
def wants(name: str) -> list:
    op = EVERYTHING[name]
    every = [(small(op, **sizes), cotangents_of(op, **sizes)) for sizes in changes(op)]
    return jax.tree.map(np.asarray, wanted_of_each(op, every))


def given(op: Op, sizes: dict[str, int]) -> tuple:
    return (*parts(op, small(op, **sizes)), cotangents_of(op, **sizes))


def runs_a_kernel(op: Op, way: str, sizes: dict[str, int]) -> bool:
    """Whether the program is another one than the portable backend's."""
    one, portable = (jax.jit(functools.partial(everything, op, run)) for run in (way, "xla"))
    return not same_program(one, portable, *given(op, sizes))


@pytest.mark.parametrize(("name", "way"), cases(("xla", "interpret", "gpu")))
def test_sizes(name, way):
    """All in one program. Where a kernel has nothing to do, most ops take the portable backend: its programs are run
    once."""
    op = EVERYTHING[name]
    chosen = [way != "interpret" or runs_a_kernel(op, way, sizes) for sizes in changes(op)]
    assert chosen[-1], "a kernel is not run with sizes of 1"
    every = list(itertools.compress(zip(changes(op), wants(name), strict=True), chosen))
    got = jax.jit(lambda every: [everything(op, way, *one) for one in every])([given(op, sizes) for sizes, _ in every])
    for (sizes, want), found in zip(every, got, strict=True):
        try:
            check(op, way, jax.tree.map(np.asarray, found), want)
        except AssertionError as error:
            error.add_note(f"with {sizes}")
            raise
