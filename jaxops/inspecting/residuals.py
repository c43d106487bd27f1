"""What a call keeps for its backward, by name."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from jaxops.offload.residuals import origin

UNNAMED = "unnamed"


@dataclasses.dataclass(frozen=True)
class Kept:
    """Arrays that live from the forward to the backward.

    Attributes:
      name: the checkpoint name; for an argument (in its own dtype) "argument lhs"; else "unnamed".
      bytes: of all arrays of this name. An argument's are no further memory.
      arrays: their dtypes and shapes.
    """

    name: str
    bytes: int
    arrays: tuple[str, ...]


def kept_of(traced: Any, names: Sequence[str]) -> tuple[Kept, ...]:
    """The residuals of a vjp.

    Args:
      traced: as from `jax.jit(f).trace(...)` of a function that returns (results, vjp).
      names: of all arguments' arrays.
    """
    results, vjp = traced.out_info
    count, jaxpr = len(jax.tree.leaves(results)), traced.jaxpr.jaxpr
    of_argument = dict(zip(jaxpr.invars, names, strict=True))
    found: dict[Any, tuple[str, Any]] = {}
    for var, aval in zip(jaxpr.outvars[count:], jax.tree.leaves(vjp), strict=True):
        source, name = origin(jaxpr, var)
        # A literal is a constant of the program. The name of what an argument was cast to is that of the cast.
        argument = of_argument.get(source) if isinstance(source, core.Var) else None
        label = name or (f"argument {argument}" if argument is not None else UNNAMED)
        found[source if isinstance(source, core.Var) else id(var)] = label, aval
    labelled: dict[str, list[Any]] = {}
    for label, aval in found.values():
        labelled.setdefault(label, []).append(aval)
    kept = [
        Kept(label, sum(x.size * x.dtype.itemsize for x in avals), tuple(f"{x.dtype}{[*x.shape]}" for x in avals))
        for label, avals in labelled.items()
    ]
    return tuple(sorted(kept, key=lambda each: -each.bytes))
