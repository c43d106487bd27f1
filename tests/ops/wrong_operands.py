"""Calls with operands that do not fit each other, traced: an error needs no device and no value."""

from typing import Any

import jax

import jaxops
from jaxops import Quantized
from tests.arrays import f32


def quantized(*sizes: int, **how: Any) -> Quantized:
    """The shapes that `jaxops.quantize` returns for an array of this one."""
    return jax.eval_shape(lambda x: jaxops.quantize(x, **how), f32(*sizes))


def trace(name: str, arguments: dict[str, Any]) -> Any:
    """The shapes of the results. Of the arguments what has no values is traced."""
    leaves, tree = jax.tree.flatten(arguments)

    def call(*traced):
        arrays = iter(traced)
        given = [next(arrays) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        return getattr(jaxops, name)(**jax.tree.unflatten(tree, given))

    return jax.eval_shape(call, *(x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)))
