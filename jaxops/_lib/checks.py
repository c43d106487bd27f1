"""Checks of arguments, before anything is launched: what was passed, what is needed, what to write instead."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("bfloat16", "float16", "float32")


def check_array(name: str, x, needed: str) -> None:
    """x has a shape and a dtype."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name} is a {type(x).__name__}; pass {needed}.")


def check_float(name: str, x: jax.Array, shape: str) -> None:
    """x is a bfloat16, float16 or float32 array with the rank of `shape`, written like "[M, K]"."""
    check_array(name, x, f"a JAX array {shape}")
    if len(x.shape) != shape.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}.")
    if jnp.dtype(x.dtype).name not in FLOATS:
        raise TypeError(
            f"{name} is {jnp.dtype(x.dtype).name}; the kernels take {', '.join(FLOATS)}. Cast it, e.g. {name}.astype(jnp.bfloat16)."
        )


def check_dtype(name: str, dtype, known: tuple[str, ...] = ()) -> jnp.dtype:
    """The dtype, one of those known by these names; any without names."""
    needed = f"it must be one of {', '.join(known)}." if known else "it must be a dtype, such as jnp.float32."
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:  # numpy's own error does not say of which argument
        raise TypeError(f"{name}={dtype!r}; {needed}") from error
    if known and found.name not in known:
        raise TypeError(f"{name}={found.name}; {needed}")
    return found


def float_dtype(name: str, dtype) -> jnp.dtype:
    """One of those that the kernels multiply."""
    return check_dtype(name, dtype, FLOATS)


def check_flag(name: str, value: Any) -> bool:
    """value is True or False, of Python or numpy: any other would count as one of them, "no" as True."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; write True or False.")
    return bool(value)


def check_integer(name: str, value: Any, least: int | None = None) -> int:
    """value is a Python or numpy integer, known when the call is traced, and at least `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"{name} is a {type(value).__name__}; it must be a Python integer, known when the call is traced."
        )
    if least is not None and value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}.")
    return int(value)


def check_number(name: str, value: Any) -> float:
    """value is a finite Python or numpy number, known when the call is traced."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} is a {type(value).__name__}; it must be a Python number, known when the call is traced."
        )
    if not np.isfinite(float(value)):
        raise ValueError(f"{name} is {value}; it must be finite.")
    return float(value)


def check_size(what: str, got: int, needed_by: str, needed: int) -> None:
    if got != needed:
        raise ValueError(f"{what} is {got}, but {needed_by} is {needed}: they must be equal.")


def check_choice(name: str, value: str | None, known) -> None:
    if not isinstance(value, (str, type(None))) or value not in known:
        raise ValueError(f"{name}={value!r}: write {', '.join(map(repr, known))}.")


def check_epsilon(name: str, value: Any) -> float:
    """value as a float: a finite Python number, at least 0."""
    epsilon = check_number(name, value)
    if epsilon < 0:
        raise ValueError(f"{name} is {value}; it must be at least 0, such as 1e-6.")
    return epsilon


def check_offsets(offsets: jax.Array, name: str = "group_offsets", count: str = "G") -> None:
    """offsets is int32 of rank 1 with at least one entry. Its values stay on the device and are never read here."""
    check_array(name, offsets, f"an int32 array of shape ({count} + 1,)")
    if len(offsets.shape) != 1 or offsets.shape[0] < 1:
        what = name.split("_")[0]
        raise ValueError(
            f"{name} has shape {tuple(offsets.shape)}; it must be ({count} + 1,): where each {what} starts, then where the last one ends."
        )
    if offsets.dtype != jnp.int32:
        raise TypeError(f"{name} is {offsets.dtype}; write {name}.astype(jnp.int32).")


def compute_dtype_of(
    name: str, x: jax.Array, other_name: str, other: jax.Array, compute_dtype, gradients: str = ""
) -> jnp.dtype:
    """In which x and other are multiplied: compute_dtype, or theirs, which is then one. gradients: whose gradient compute_dtype leaves as it is, where the
    caller may choose one."""
    if compute_dtype is not None:
        return float_dtype("compute_dtype", compute_dtype)
    if x.dtype != other.dtype:
        choose = f", or pass compute_dtype=jnp.{x.dtype} ({gradients} {other.dtype})." if gradients else "."
        raise TypeError(f"{name} is {x.dtype} and {other_name} is {other.dtype}: cast one of them{choose}")
    return jnp.dtype(x.dtype)
