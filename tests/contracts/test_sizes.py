"""Every op and layer with sizes of 0 and 1."""

import functools

import jax
import numpy as np
import pytest

from tests.contracts.entry import Op
from tests.contracts.run import EVERYTHING, cases, check, cotangents_of, everything, parts, small, wanted_of_each


def changes(op: Op) -> list[dict[str, int]]:
    """Each size 0; and all sizes 1: the ops' own tests draw others at random."""
    return [*({size: 0} for size in op.sizes), dict.fromkeys(op.sizes, 1)]


@functools.cache
def wants(name: str) -> list:
    op = EVERYTHING[name]
    every = [(small(op, **sizes), cotangents_of(op, **sizes)) for sizes in changes(op)]
    return jax.tree.map(np.asarray, wanted_of_each(op, every))


@pytest.mark.parametrize(("name", "way"), cases(("xla", "interpret", "gpu")))
def test_sizes(name, way):
    """All in one program."""
    op = EVERYTHING[name]
    every = [(*parts(op, small(op, **sizes)), cotangents_of(op, **sizes)) for sizes in changes(op)]
    got = jax.jit(lambda every: [everything(op, way, *given) for given in every])(every)
    for sizes, found, want in zip(changes(op), got, wants(name), strict=True):
        try:
            check(op, way, jax.tree.map(np.asarray, found), want)
        except AssertionError as error:
            raise AssertionError(f"with {sizes}: {error}") from error
