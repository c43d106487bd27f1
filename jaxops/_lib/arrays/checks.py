"""Checks of arguments before any launch. Errors say what was passed, what is needed, and what to write instead."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("bfloat16", "float16", "float32")


def type_name(value: Any) -> str:
    """For errors: "None", "an array", "an int", "a list"."""
    name = "array" if isinstance(value, jax.Array) else type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def check_array(name: str, x, needed: str) -> None:
    """x has a shape and a dtype, and is one array. A quantized tensor of another library is a tree of arrays with the
    shape and the dtype of the tensor."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name} is {type_name(x)}; pass {needed}.")
    convert = getattr(x, "__jax_array__", None)  # of a variable of flax
    held = convert() if callable(convert) else x
    if not jax.tree_util.all_leaves([held]):
        tree = f"{name} is {type_name(held)}, a tree of several arrays"
        raise TypeError(f"{tree}; pass {needed}: dequantize it first, as qwix.dequantize does.")


def check_float(name: str, x: jax.Array, shape: str) -> None:
    """x is a bfloat16, float16 or float32 array of the rank of `shape`, e.g. "[M, K]"."""
    check_array(name, x, f"a JAX array {shape}")
    if len(x.shape) != shape.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}.")
    dtype = jnp.dtype(x.dtype).name
    if dtype not in FLOATS:
        known, nearest = ", ".join(FLOATS), "float32" if dtype == "float64" else "bfloat16"
        raise TypeError(f"{name} is {dtype}; the kernels take {known}. Cast it, e.g. {name}.astype(jnp.{nearest}).")


def check_exact(name: str, x, dtype: str, axes: str, shape: tuple[int, ...], what: str) -> None:
    """x has this dtype and shape. axes: of the shape, as "[T]". what: an element is, as "True for each that counts"."""
    check_array(name, x, f"a {dtype} array {axes}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {axes} = {shape}, {what}.")
    if x.dtype != dtype:
        raise TypeError(f"{name} is {x.dtype}; write {name}.astype(jnp.{dtype}).")


def check_dtype(name: str, dtype, known: tuple[str, ...] = ()) -> jnp.dtype:
    """The dtype, whose name must be in `known` unless that is empty."""
    needed = f"it must be one of {', '.join(known)}." if known else "it must be a dtype, such as jnp.float32."
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:  # numpy's own error does not name the argument
        raise TypeError(f"{name}={dtype!r}; {needed}") from error
    if known and found.name not in known:
        raise TypeError(f"{name}={found.name}; {needed}")
    return found


def float_dtype(name: str, dtype) -> jnp.dtype:
    """bfloat16, float16 or float32."""
    return check_dtype(name, dtype, FLOATS)


def check_flag(name: str, value: Any) -> bool:
    """value is Python's or numpy's True or False, not merely truthy: "no" would be."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} is {type_name(value)}; write True or False.")
    return bool(value)


def check_integer(name: str, value: Any, least: int | None = None) -> int:
    """value is a Python or numpy integer, known when the call is traced, and at least `least`."""
    _check_kind(name, value, numbers.Integral, "integer")
    _check_least(name, value, least)
    return int(value)


def check_number(name: str, value: Any, least: int | None = None) -> float:
    """value is a finite Python or numpy number, known when the call is traced, and at least `least`."""
    _check_kind(name, value, numbers.Real, "number")
    if not np.isfinite(float(value)):
        raise ValueError(f"{name} is {value}; it must be finite.")
    _check_least(name, value, least)
    return float(value)


def _check_kind(name: str, value: Any, kind: type, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        needed = f"it must be a Python {what}, known when the call is traced."
        raise TypeError(f"{name} is {type_name(value)}; {needed}")


def _check_least(name: str, value: Any, least: int | None) -> None:
    if least is not None and value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}.")


def check_size(what: str, got: int, needed_by: str, needed: int) -> None:
    if got != needed:
        raise ValueError(f"{what} is {got}, but {needed_by} is {needed}: they must be equal.")


def check_groups(group_offsets: jax.Array, groups: str, G: int) -> None:
    """group_offsets [G + 1] fit an array whose groups are counted by `groups`, e.g. "rhs.shape[0]"."""
    found = group_offsets.shape[0]
    if found != G + 1:
        needed = "the cumulative sum of the group sizes, with a 0 before it"
        raise ValueError(f"len(group_offsets) is {found}; {groups} = {G} groups need {G + 1} offsets: {needed}.")


def check_choice(name: str, value: Any, known, others: str = "") -> None:
    """others: what the caller takes besides, for the message."""
    if not isinstance(value, (str, type(None))) or value not in known:
        raise ValueError(f"{name}={value!r}: write {', '.join(map(repr, known))}{others and f', or {others}'}.")


def check_offsets(offsets: jax.Array, name: str = "group_offsets", count: str = "G") -> None:
    """offsets is int32 of rank 1 with at least one entry. Its values stay on the device and are never read here."""
    check_array(name, offsets, f"an int32 array of shape ({count} + 1,)")
    if len(offsets.shape) != 1 or offsets.shape[0] < 1:
        needed = f"({count} + 1,): where each {name.split('_')[0]} starts, then where the last one ends."
        raise ValueError(f"{name} has shape {tuple(offsets.shape)}; it must be {needed}")
    if offsets.dtype != jnp.int32:
        raise TypeError(f"{name} is {offsets.dtype}; write {name}.astype(jnp.int32).")


def compute_dtype_of(
    name: str, x: jax.Array, other_name: str, other: jax.Array, compute_dtype, gradients: str = ""
) -> jnp.dtype:
    """The dtype that x and other are multiplied in: compute_dtype, else their own, which must be the same.

    gradients: named in the error as unchanged by compute_dtype; "" if the caller has no such argument.
    """
    if compute_dtype is not None:
        return float_dtype("compute_dtype", compute_dtype)
    if x.dtype != other.dtype:
        choose = f", or pass compute_dtype=jnp.{x.dtype} ({gradients} {other.dtype})." if gradients else "."
        raise TypeError(f"{name} is {x.dtype} and {other_name} is {other.dtype}: cast one of them{choose}")
    return jnp.dtype(x.dtype)


def check_out_sharding(out_sharding: Any) -> None:
    """out_sharding, as of `jax.lax.dot_general`, is None, or a PartitionSpec or NamedSharding that splits no axis, or
    only over mesh axes of one device.

    Raises:
      NotImplementedError: another one.
    """
    spec, mesh = out_sharding, jax.sharding.get_abstract_mesh()
    if isinstance(out_sharding, jax.sharding.NamedSharding):
        spec, mesh = out_sharding.spec, out_sharding.mesh
    if spec is None:
        return
    if isinstance(spec, jax.sharding.PartitionSpec) and not (spec.unreduced or spec.reduced):
        axes = [axis for part in spec for axis in (part if isinstance(part, tuple) else (part,)) if axis is not None]
        if all(mesh.shape.get(axis) == 1 for axis in axes):
            return
    raise NotImplementedError(
        f"out_sharding is {out_sharding}; only one that splits no axis is supported: constrain the result with "
        "jax.lax.with_sharding_constraint, or call this inside jax.shard_map."
    )
