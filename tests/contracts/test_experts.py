"""Ops over groups whose weights are split over devices: each device has a slice of the offsets, and results add up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.arrays import put
from tests.compare import assert_close
from tests.contracts.entry import reference
from tests.contracts.run import EVERYTHING, cases, small
from tests.devices import needs_two

pytestmark = [pytest.mark.versions, needs_two]
WEIGHTS = {"grouped_matmul": ("rhs", "bias"), "grouped_glu": ("w_gate", "w_up")}


@pytest.mark.parametrize(("name", "way"), cases(("xla", "interpret"), where=lambda op, way: op.name in WEIGHTS))
def test_experts_over_devices(name, way):
    """Results and gradients of one device with all groups; rows outside all groups are NaN. The gradient of replicated
    rows is a psum."""
    op = EVERYTHING[name]
    arguments, offsets = small(op), "group_offsets"
    rows = next(argument for argument in arguments if argument not in (*WEIGHTS[name], offsets))
    arguments[rows][: arguments[offsets][0]] = np.nan
    held = {key: arguments[key] for key in op.wrt}
    mesh = jax.make_mesh((2,), ("e",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))

    def shard(held, offsets):
        each = (offsets.shape[0] - 1) // 2
        mine = jax.lax.dynamic_slice_in_dim(offsets, jax.lax.axis_index("e") * each, each + 1)
        return jax.lax.psum(op.call(held | {"group_offsets": mine}, **op.ways[way]), "e")

    specs = {key: P("e") if key in WEIGHTS[name] else P() for key in held}, P()
    # Pallas' interpreter cannot follow varying axes; test_transforms.py traces the kernels' own types.
    split = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=way == "xla")

    @functools.partial(jax.jit, static_argnums=0)
    def result_and_gradients(f, held):
        y, vjp = jax.vjp(lambda held: f(held, put(arguments[offsets])), held)
        return y, vjp(jnp.cos(y))[0]

    clean = held | {rows: np.nan_to_num(held[rows])}
    want = result_and_gradients(lambda held, offsets: reference(name, **held, group_offsets=offsets), clean)
    got = result_and_gradients(split, held)
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, "float32", jax.tree_util.keystr(path), scale=10)
