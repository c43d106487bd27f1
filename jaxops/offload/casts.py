"""Arguments that a function does nothing with but cast."""

import collections
from typing import Any

import jax.numpy as jnp
from jax.extend import core


def without_casts(closed: core.ClosedJaxpr, first: int) -> core.ClosedJaxpr:
    """The function with each argument from `first` on that it only casts, once, to a narrower float, in that type.

    Such an argument's gradient comes in that type, too. Of parameters in float32 and products in bfloat16 a stack of all layers' gradients then takes half the
    memory, and has the same numbers: what the cast's own gradient widens is rounded already.
    """
    jaxpr = closed.jaxpr
    users: dict[Any, list[Any]] = collections.defaultdict(list)
    for eqn in jaxpr.eqns:
        for var in eqn.invars:
            if isinstance(var, core.Var):
                users[var].append(eqn)
    # With two casts the gradient is a sum of two, which only the wider type may add up.
    casts = {
        var: users[var][0]
        for var in jaxpr.invars[first:]
        if len(users[var]) == 1 and var not in jaxpr.outvars and _narrows(users[var][0])
    }
    invars = [casts[var].outvars[0] if var in casts else var for var in jaxpr.invars]
    eqns = [eqn for eqn in jaxpr.eqns if not any(eqn is cast for cast in casts.values())]
    return closed.replace(jaxpr=jaxpr.replace(invars=invars, eqns=eqns))


def _narrows(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type" or eqn.params["sharding"] is not None:
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return (
        jnp.issubdtype(before, jnp.floating)
        and jnp.issubdtype(after, jnp.floating)
        and after.itemsize < before.itemsize
    )
