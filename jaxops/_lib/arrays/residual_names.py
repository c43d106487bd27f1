"""Names for residuals of functions that give them none."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.arrays.checks import type_name

Function = TypeVar("Function", bound=Callable)


def check_name(name: Any, where: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{where} has {name!r}, {type_name(name)}; names are strings.")
    if not all(name.split(".")):
        raise ValueError(f"{where} has the name {name!r}: a name and each of its parts between dots must not be empty.")


def named(function: Function, name: str) -> Function:
    """`function`, with all its residuals called `name`: a policy that keeps or offloads it recomputes nothing.

    For functions whose residuals have no names, such as cuDNN attention with its softmax statistics. `function` takes
    arrays as positional arguments; arrays that it closes over get no gradient. TypeError or ValueError for a bad name.
    """
    check_name(name, "named")

    @jax.custom_vjp
    def run(*args):
        return function(*args)

    def forward(*args):
        results = jax.vjp(function, *args)
        # By identity: a result that is also a residual stays one value.
        once = {id(x): checkpoint_name(x, name) for x in jax.tree.leaves(results)}
        return jax.tree.map(lambda x: once[id(x)], results)

    run.defvjp(forward, lambda vjp, cotangents: vjp(cotangents))
    return run  # pyright: ignore[reportReturnType]
