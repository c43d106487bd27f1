"""Which manual mesh axes a kernel's operands and results vary over, for shard_map's check_vma=True."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.checks import type_name


def vary_together(*operands: Any) -> tuple:
    """The operands, pytrees of arrays, with every array marked as varying over each manual mesh axis that any varies
    over.

    A weight that is replicated over an axis whose tokens differ has a gradient that is the sum over that axis: with the
    mark outside of the custom_vjp, JAX's transpose of the mark is that sum. Outside of shard_map, or with
    check_vma=False, nothing is marked. NumPy arrays become JAX arrays: rules of a custom_vjp that are not compiled
    would get them unchanged, and a tracer cannot index a NumPy array.

    Raises:
      ValueError: an array on a mesh with Explicit axes (JAX's default), outside of `jax.shard_map`: the ops have no
        rule for how their results are sharded.
    """
    operands = jax.tree.map(jnp.asarray, operands)
    types = [jax.typeof(x) for x in jax.tree.leaves(operands)]
    for type_ in types:
        if type_.sharding is not None and type_.sharding.mesh.explicit_axes:
            found = f"an operand of type {type_} is on a mesh with Explicit axes, {type_.sharding.mesh.explicit_axes}"
            auto = "axis_types=(jax.sharding.AxisType.Auto,) * number of axes"
            raise ValueError(f"{found}: call inside jax.shard_map, or make the mesh with {auto}.")
    axes = set().union(*map(_axes, types))
    return jax.tree.map(lambda x: _mark(x, axes), operands)


def axis_index(axis_name: Any) -> jax.Array:
    """This device's number on a mesh axis of the `jax.shard_map` around the call.

    Raises:
      TypeError: axis_name is no string.
      ValueError: there is no such axis.
    """
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name is {type_name(axis_name)}; it must be the name of one mesh axis.")
    try:
        return lax.axis_index(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis here: call inside jax.shard_map over a mesh that has it."
        ) from None


def vary_as(like: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
    """x, marked as varying over every axis that `like` varies over."""
    return _mark(x, _axes(like))


def barrier(operand: Any) -> Any:
    """`lax.optimization_barrier` on the arrays that vary over all axes that any of them varies over. JAX 0.10 would
    mark the others as varying, and the gradient of a replicated weight must stay unmarked."""
    arrays, tree = jax.tree.flatten(operand)
    axes = set().union(*(_axes(jax.typeof(x)) for x in arrays))
    tied = lax.optimization_barrier({i: x for i, x in enumerate(arrays) if _axes(jax.typeof(x)) == axes})
    return tree.unflatten([tied.get(i, x) for i, x in enumerate(arrays)])


def _axes(type_) -> set:
    return set() if type_.manual_axis_type is None else set(type_.manual_axis_type.varying)


def _mark(x: jax.Array, axes: set) -> jax.Array:
    missing = tuple(sorted(axes - _axes(jax.typeof(x))))
    return lax.pcast(x, missing, to="varying") if missing else x


def out_struct(shape: tuple[int, ...], dtype, like: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result that varies over the mesh axes that `like` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)
