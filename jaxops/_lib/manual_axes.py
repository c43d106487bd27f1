"""What shard_map's check_vma=True asks of a kernel's operands and results."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def vary_together(*arrays: jax.Array | None) -> tuple:
    """The arrays, each marked as varying over every manual mesh axis that any of them varies over.

    A weight that is replicated over an axis whose tokens differ has a gradient that is the sum over that axis: marked outside a custom_vjp,
    JAX's own transpose of the mark makes that sum. Outside shard_map, or with check_vma=False, the arrays come back as they are, but numpy's as JAX's: a
    custom_vjp's rules that are not compiled would get them as they are, and a traced number indexes no array of numpy.

    Raises:
      ValueError: an array on a mesh with Explicit axes, outside of `jax.shard_map`.
    """
    arrays = tuple(None if x is None else jnp.asarray(x) for x in arrays)
    for x in arrays:
        _check_explicit_axes(x)
    axes = set().union(*(_axes(jax.typeof(x)) for x in arrays if x is not None))
    return tuple(None if x is None else _mark(x, axes) for x in arrays)


def _check_explicit_axes(x: jax.Array | None) -> None:
    """The ops have no rule that says how a result is sharded. Explicit axes, the default of `jax.make_mesh`, need one."""
    sharding: Any = None if x is None else jax.typeof(x).sharding
    if sharding is not None and sharding.mesh.explicit_axes:
        raise ValueError(
            f"an operand of type {jax.typeof(x)} is on a mesh with Explicit axes, {sharding.mesh.explicit_axes}: call inside jax.shard_map, "
            "or make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * number of axes."
        )


def vary_as(like: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
    """x, marked as varying over every axis that `like` varies over."""
    return _mark(x, _axes(like))


def barrier(operand: Any) -> Any:
    """`lax.optimization_barrier`, without the arrays that do not vary over all axes that others do: JAX 0.10 would mark them, and the gradient of a replicated
    weight must stay without the mark."""
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
