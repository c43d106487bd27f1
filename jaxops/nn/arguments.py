"""Arguments of layers: checks at construction, and parts that a layer constructs itself."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxops.ops.fp8_matmul import RECIPES

_FLOATS = ("bfloat16", "float16", "float32")


def check_sizes(**sizes: Any) -> None:
    """
    Raises:
      TypeError: a size that is no integer.
      ValueError: a size below 1.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"{name} is a {type(size).__name__}; it must be an integer.")
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1.")


def check_backend(backend: Any, *kernels: str) -> None:
    """The layer's ops know the backend. Whether the device can run it is checked by the call."""
    known = ("auto", *kernels, "xla")
    if not isinstance(backend, str) or backend not in known:
        raise ValueError(f"backend={backend!r}: write {', '.join(map(repr, known[:-1]))} or {known[-1]!r}.")


def check_dtypes(dtype: Any, param_dtype: Any) -> None:
    """The dtypes of a layer whose kernels multiply in dtype, which is None where the call's arrays decide.

    Raises:
      TypeError: another dtype than bfloat16, float16 or float32.
    """
    for name, value in {"dtype": jnp.float32 if dtype is None else dtype, "param_dtype": param_dtype}.items():
        try:
            known = jnp.dtype(value).name in _FLOATS
        except TypeError:  # numpy's own error does not name the argument
            known = False
        if not known:
            raise TypeError(f"{name}={value!r}; it must be one of {', '.join(_FLOATS)}.")


def check_recipe(recipe: Any) -> None:
    if recipe not in tuple(RECIPES):
        raise ValueError(f"recipe is {recipe!r}; it must be one of {', '.join(map(repr, RECIPES))}.")


def check_grouped_recipe(recipe: Any, precision: Any, pow2_scales: bool) -> None:
    """The recipe of products over groups of rows, which need none.

    Raises:
      NotImplementedError: recipe "delayed".
      ValueError: an unknown recipe, a precision with a recipe, pow2_scales without one.
    """
    if recipe == "delayed":
        raise NotImplementedError(
            "recipe is 'delayed', which has no grouped form: the rows of a group differ from step to step. "
            "Take 'tensorwise', which scales by the current values."
        )
    if recipe is not None:
        check_recipe(recipe)
        if precision is not None:
            raise ValueError(f"precision is {precision!r}; it must be None: recipe={recipe!r} sets the precision.")
    elif pow2_scales:
        raise ValueError("pow2_scales=True needs an FP8 recipe, such as recipe='blockwise'.")


def _check_floats(x: Any, shape: str) -> None:
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"x is a {type(x).__name__}; pass a JAX array {shape}.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        known = ", ".join(_FLOATS)
        raise TypeError(f"x is {x.dtype}; it must be one of {known}. Cast it, e.g. x.astype(jnp.bfloat16).")


def check_columns(x: jax.Array, columns: int) -> None:
    _check_floats(x, f"[..., in_features={columns}]")
    if x.ndim < 1 or x.shape[-1] != columns:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [..., in_features={columns}].")


def check_matrix(x: jax.Array, shape: str, columns: int) -> None:
    _check_floats(x, shape)
    if x.ndim != 2 or x.shape[1] != columns:
        flatten = "flatten leading axes with x.reshape(-1, x.shape[-1])"
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be {shape}: {flatten}.")


def check_mask(mask: Any, shape: tuple[int, ...]) -> None:
    if (found := getattr(mask, "shape", None)) != shape:
        raise ValueError(f"mask has shape {found}; it must be a bool array {shape}, True for each token that counts.")
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask is {mask.dtype}; write mask.astype(jnp.bool).")


def devices_on(argument: str, axis: str | tuple[str, ...], instead: str = "") -> int:
    """The number of devices on a mesh axis, or on several together.

    Args:
      argument: what the layer calls the axis.
      instead: what else the user may do.

    Raises:
      ValueError: no axis of that name here.
    """
    try:
        return lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"{argument}={axis!r} is not an axis here: call this layer inside jax.shard_map over a mesh that has it"
            f"{instead}."
        ) from None


def make_part(part: Any, *args: Any, rngs: nnx.Rngs) -> Any:
    """`part(*args, rngs=rngs)` if part is a class or a `functools.partial` of one, else part itself."""
    made_of = part.func if isinstance(part, functools.partial) else part
    return part(*args, rngs=rngs) if inspect.isclass(made_of) else part
