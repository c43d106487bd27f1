"""A linear layer with some of a recipe's six casts, so that a loss of quality can be traced to one of them."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

import jaxops
from jaxops.ops.fp8_matmul.recipes import RECIPES

# Product and operand -> the operand's name in the recipe, and the layout whose rows the product sums over.
CASTS: dict[str, tuple[str, Literal["row", "col"]]] = {
    "fwd.lhs": ("lhs", "row"),
    "fwd.rhs": ("rhs", "col"),
    "dgrad.dout": ("dout", "row"),
    "dgrad.rhs": ("rhs", "row"),
    "wgrad.lhs": ("lhs", "col"),
    "wgrad.dout": ("dout", "col"),
}
PRODUCTS: tuple[str, ...] = ("fwd", "dgrad", "wgrad")


@dataclasses.dataclass(frozen=True)
class SomeCasts:
    """`jax.lax.dot_general` for the `dot_general` argument of `nnx.Linear`, whose operands are rounded by some casts.

    Operands that are not cast stay in their dtype. All products are exact but for float32 sums.

    Attributes:
      recipe: of `jaxops.fp8_matmul`; not "delayed", which has state.
      casts: of `CASTS`, or of `PRODUCTS` for both casts of one.
    """

    recipe: str
    casts: tuple[str, ...]

    def __call__(self, x: jax.Array, kernel: jax.Array, dimension_numbers, precision=None, **_: Any) -> jax.Array:
        """x [..., K] @ kernel [K, N], as `nnx.Linear` calls it."""
        if dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
            raise NotImplementedError(f"dimension_numbers are {dimension_numbers}: not those of x [..., K] @ [K, N].")
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        out: Any = _product(self, rows, kernel)
        return out.reshape(*x.shape[:-1], kernel.shape[1])

    def rounded(self, x: jax.Array, cast: str) -> jax.Array:
        """x in float32, rounded if that cast is made."""
        if cast not in self.casts and cast.split(".")[0] not in self.casts:
            return x.astype(jnp.float32)
        tensor, layout = CASTS[cast]
        form = getattr(RECIPES[self.recipe], tensor)
        quantized = jaxops.quantize(x, scaling=form.scaling, dtype=form.dtype, layouts=layout)
        return jaxops.dequantize(quantized, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: SomeCasts, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _dot(how.rounded(x, "fwd.lhs"), how.rounded(kernel, "fwd.rhs")).astype(x.dtype)


def _product_fwd(how: SomeCasts, x: jax.Array, kernel: jax.Array):
    return _product(how, x, kernel), (x, kernel)


def _product_bwd(how: SomeCasts, saved: tuple[jax.Array, jax.Array], dout: jax.Array):
    x, kernel = saved
    dx = _dot(how.rounded(dout, "dgrad.dout"), how.rounded(kernel, "dgrad.rhs").T)
    dkernel = _dot(how.rounded(x, "wgrad.lhs").T, how.rounded(dout, "wgrad.dout"))
    return dx.astype(x.dtype), dkernel.astype(kernel.dtype)


_product.defvjp(_product_fwd, _product_bwd)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
