"""Checks of the public functions' arguments: what was passed, what is needed, what to write instead."""

import jax
import jax.numpy as jnp

from jaxops._lib.checks import check_array, check_float, float_dtype
from jaxops._lib.fp8 import Quantized
from jaxops.ops.fp8_matmul.operand import shape_of
from jaxops.ops.fp8_matmul.recipes import Format, Recipe


def check_tensor(name: str, x, shape: str, recipe: Recipe, form: Format) -> tuple[int, ...]:
    """x is a float array, or quantised as the recipe wants it. Its shape, with the rank of `shape`, written like "[K, N]"."""
    if not isinstance(x, Quantized):
        check_float(name, x, shape)
        return x.shape
    check_quantized(name, x, shape, recipe, form)
    return shape_of(x)


def check_quantized(name: str, q, shape: str, recipe: Recipe, form: Format) -> None:
    if not isinstance(q, Quantized):
        raise TypeError(f"{name} is a {type(q).__name__}; pass what jaxops.quantize returns.")
    if q.values is None and q.values_t is None:
        raise ValueError(f"{name} has neither a row nor a column layout.")
    if len(shape_of(q)) != shape.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(shape_of(q))}; it must be {shape}.")
    if q.scaling != form.scaling:
        raise ValueError(f"{name} has {q.scaling} scales; recipe={recipe.name!r} takes scaling={form.scaling!r}.")


def check_cache(name: str, q, of: str, x, shape: str, recipe: Recipe) -> None:
    """q, if there is one, is the array x as it was quantised before."""
    if q is None:
        return
    if isinstance(x, Quantized):
        raise ValueError(f"{of} is quantised already: leave {name} away.")
    check_quantized(name, q, shape, recipe, recipe.w)
    if shape_of(q) != tuple(x.shape):
        raise ValueError(f"{name} has shape {tuple(shape_of(q))}; it must be that of {of}, {tuple(x.shape)}.")


def check_amax(amax, recipe: Recipe) -> None:
    if not recipe.delayed:
        if amax is not None:
            raise ValueError(
                f"recipe={recipe.name!r} scales by what its tensors hold now; only recipe='delayed' takes amax."
            )
        return
    if not isinstance(amax, tuple) or len(amax) != 2:
        raise ValueError(
            "recipe='delayed' needs amax=(largest magnitude of x, of w) of earlier steps: two float32 scalars."
        )
    for name, value in zip(("amax[0] (of x)", "amax[1] (of w)"), amax, strict=True):
        check_array(name, value, "a float32 scalar")
        if value.shape != () or value.dtype != jnp.float32:
            raise TypeError(f"{name} is {value.dtype}{list(value.shape)}; it must be a float32 scalar.")


def check_out_dtype(out_dtype, x: jax.Array | Quantized) -> str:
    """Its name; the tensor's own dtype by default."""
    return float_dtype("out_dtype", x.dtype if out_dtype is None else out_dtype).name
