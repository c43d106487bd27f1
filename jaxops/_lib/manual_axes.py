"""What shard_map's check_vma=True asks of a kernel's operands and results."""

import jax
from jax import lax


def vary_together(*arrays: jax.Array | None) -> tuple:
    """The arrays, each marked as varying over every manual mesh axis that any of them varies over.

    A weight that is replicated over an axis whose tokens differ has a gradient that is the sum over that axis: marked outside a custom_vjp,
    JAX's own transpose of the mark makes that sum. Outside shard_map, or with check_vma=False, the arrays come back as they are.
    """
    axes = set().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None))

    def mark(x):
        missing = tuple(sorted(axes - set(jax.typeof(x).manual_axis_type.varying)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return tuple(None if x is None else mark(x) for x in arrays)


def out_struct(shape: tuple[int, ...], dtype, like: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result that varies over the mesh axes that `like` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)
