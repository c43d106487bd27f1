"""Arguments that a function does nothing with but cast."""

import collections
from typing import Any

import jax.numpy as jnp
from jax.extend import core


def without_casts(closed: core.ClosedJaxpr, first: int) -> core.ClosedJaxpr:
    """The function with each argument from `first` on that it only casts, to one narrower float, in that type.

    Such an argument's gradient comes in that type, too. Of parameters in float32 and products in bfloat16 a stack of all layers' gradients then takes half the
    memory, and has the same numbers: what the cast's own gradient widens is rounded already.
    """
    jaxpr = closed.jaxpr
    users: dict[Any, list[Any]] = collections.defaultdict(list)
    for eqn in jaxpr.eqns:
        for var in filter(_is_var, eqn.invars):
            users[var].append(eqn)
    invars, renamed = list(jaxpr.invars), {}
    for i, var in enumerate(invars[first:], first):
        results = _casts(var, users[var])
        if results and var not in jaxpr.outvars:
            invars[i] = results[0]
            renamed |= dict.fromkeys(results, results[0])
    rename = lambda variables: [renamed.get(v, v) if _is_var(v) else v for v in variables]
    eqns = [eqn.replace(invars=rename(eqn.invars)) for eqn in jaxpr.eqns if not renamed.keys() & set(eqn.outvars)]
    return closed.replace(jaxpr=jaxpr.replace(invars=invars, eqns=eqns, outvars=rename(jaxpr.outvars)))


def _casts(var: Any, users: list[Any]) -> list[Any]:
    """What var is cast to, if all its users are casts to one narrower float."""
    if {(eqn.primitive.name, eqn.params.get("sharding")) for eqn in users} != {("convert_element_type", None)}:
        return []
    results = [eqn.outvars[0] for eqn in users]
    dtype = results[0].aval.dtype
    narrower = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(var.aval.dtype, jnp.floating) and dtype.itemsize < var.aval.dtype.itemsize
    return results if narrower and all(v.aval == results[0].aval for v in results) else []


def _is_var(x: Any) -> bool:
    return isinstance(x, core.Var)
