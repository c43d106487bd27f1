"""Checks of arguments, before anything is launched: what was passed, what is needed, what to write instead."""

import jax
import jax.numpy as jnp

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
        raise TypeError(f"{name} is {jnp.dtype(x.dtype).name}; the kernels multiply {', '.join(FLOATS)}. Cast it, e.g. {name}.astype(jnp.bfloat16).")


def check_size(what: str, got: int, needed_by: str, needed: int) -> None:
    if got != needed:
        raise ValueError(f"{what} is {got}, but {needed_by} is {needed}: they must be equal.")


def check_offsets(group_offsets: jax.Array) -> None:
    """group_offsets is int32 of rank 1 with at least one entry. Its values stay on the device and are never read here."""
    check_array("group_offsets", group_offsets, "an int32 array of shape (G + 1,)")
    if len(group_offsets.shape) != 1 or group_offsets.shape[0] < 1:
        raise ValueError(f"group_offsets has shape {tuple(group_offsets.shape)}; it must be (G + 1,): where each group starts, then where the last one ends.")
    if group_offsets.dtype != jnp.int32:
        raise TypeError(f"group_offsets is {group_offsets.dtype}; write group_offsets.astype(jnp.int32).")
