"""Parts of all devices, and sums of parts, over one axis of a mesh or two in either order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxops.parallel import add_own_rows, gather_parts, gather_pieces, sum_parts
from tests.devices import needs_four

pytestmark = [pytest.mark.versions, needs_four]
AXES = ["i", ("i",), ("i", "j"), ("j", "i"), "k"]  # k has one device


def over(mesh, op, x, axis_name):
    """op on each device's part of x [2, 2, 1, ...] over a mesh of that shape."""
    local = lambda x: op(x[0, 0, 0], axis_name)[None, None, None]
    split = P("i", "j", "k")
    return np.asarray(jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split))(x), np.float32)


def groups(x, axis_name):
    """x's parts of the devices that share their other axes: (their numbers in the order of axis_name, parts)."""
    axes = ["ijk".index(name) for name in ((axis_name,) if isinstance(axis_name, str) else axis_name)]
    sizes = [x.shape[axis] for axis in axes]
    for rest in np.ndindex(*(1 if axis in axes else x.shape[axis] for axis in range(3))):
        numbers = []
        for at in np.ndindex(*sizes):
            number = list(rest)
            for axis, place in zip(axes, at, strict=True):
                number[axis] = place
            numbers.append(tuple(number))
        yield numbers, [x[number] for number in numbers]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2, 1), ("i", "j", "k"), (AxisType.Auto,) * 3, devices=jax.devices()[:4])


@pytest.mark.parametrize("axis_name", AXES)
@pytest.mark.parametrize("axis", [0, 1])
def test_gather_parts(mesh, axis_name, axis):
    x = np.random.default_rng(0).normal(size=(2, 2, 1, 3, 5)).astype(np.float32)
    got = over(mesh, lambda x, name: gather_parts(x, name, axis), x, axis_name)
    for numbers, parts in groups(x, axis_name):
        for number in numbers:
            np.testing.assert_array_equal(got[number], np.concatenate(parts, axis))


@pytest.mark.parametrize("axis_name", AXES)
@pytest.mark.parametrize("axis", [0, 1])
def test_sum_parts(mesh, axis_name, axis):
    """Sent in bfloat16 and added in float32: one device's values are far below the other's last bit."""
    x = np.random.default_rng(1).normal(size=(2, 2, 1, 4, 8)).astype(np.float32)
    x[1] *= 2.0**-12
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    got = over(mesh, lambda x, name: sum_parts(x, name, axis, dtype=jnp.float32), x, axis_name)
    for numbers, parts in groups(x, axis_name):
        whole = np.sum(np.stack(parts).astype(np.float64), axis=0)
        for number, want in zip(numbers, np.split(whole, len(numbers), axis), strict=True):
            np.testing.assert_allclose(got[number], want, rtol=1e-6)


def test_pieces_are_added_in_float32():
    """Results of experts, and gradients of tokens: sent in bfloat16, whose sums of 256 and 1 are 256."""
    mesh = jax.make_mesh((4,), ("i",), (AxisType.Auto,), devices=jax.devices()[:4])
    x = np.where(np.arange(4) == 0, 256, 1).astype(jnp.bfloat16)  # a number of each device, for every device

    def device(x):
        pieces = tuple(jnp.full((4, width), x[0]) for width in (1, 3))
        own = tuple(jnp.full((1, width), x[0]) for width in (1, 3))
        gradients = jax.vjp(lambda *own: gather_pieces(own, "i"), *own)[1](pieces)
        return add_own_rows(pieces, "i"), gradients

    split = jax.shard_map(device, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    for found in jax.tree.leaves(jax.jit(split)(x)):
        np.testing.assert_array_equal(np.asarray(found, np.float32), 260)  # of 259, by rounding to even
