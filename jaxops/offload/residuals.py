"""The names of residuals: how large they are, and one for those of functions that give them none."""

import collections
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jaxops.offload.names import check_name

Function = TypeVar("Function", bound=Callable)


def named(function: Function, name: str) -> Function:
    """`function`, of which everything that its backward needs is called `name`: arguments, results and what lies between.

    For what is another's, as attention by cuDNN, whose softmax's sums have no name of their own: a policy could save all else, and the kernel would run twice.
    A policy that keeps or offloads `name` leaves nothing of the function to be computed again.

    Args:
      function: of arrays alone, all as positional arguments: what it takes from around it has no gradient.

    Raises:
      TypeError, ValueError: a name that is no string, or empty.
    """
    check_name(name, "named")

    @jax.custom_vjp
    def run(*args):
        return function(*args)

    def forward(*args):
        out, vjp = jax.vjp(function, *args)
        once = {
            id(x): checkpoint_name(x, name) for x in jax.tree.leaves((out, vjp))
        }  # a result that is also a residual is one value
        return jax.tree.map(lambda x: once[id(x)], (out, vjp))

    run.defvjp(forward, lambda vjp, cotangents: vjp(cotangents))
    return run  # pyright: ignore[reportReturnType]


def residual_bytes(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Bytes of the values by name in `function(*args)` and what its backward needs; of values in a loop, those of all rounds together.

    `args` are arrays or `jax.ShapeDtypeStruct`s; nothing is computed.
    """
    return count_names(jax.make_jaxpr(lambda *args: jax.vjp(function, *args))(*args).jaxpr)


def count_names(jaxpr: Any) -> dict[str, int]:
    """Bytes by name of the values that have one, wherever in a jaxpr they stand."""
    found: dict[str, int] = collections.Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            aval = eqn.outvars[0].aval
            found[eqn.params["name"]] += aval.size * aval.dtype.itemsize
        rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in core.jaxprs_in_params(eqn.params):
            for name, size in count_names(inner).items():
                found[name] += rounds * size
    return dict(found)


def origin(jaxpr: core.Jaxpr, var: Any) -> tuple[Any, str | None]:
    """Where a value of a jaxpr was made, behind all calls that it only went through, and its name, if it has one: equal for equal values, one of the jaxpr's
    `invars` for what is passed on."""
    producers = {out: (eqn, i) for eqn in jaxpr.eqns for i, out in enumerate(eqn.outvars)}
    while isinstance(var, core.Var) and var in producers:
        eqn, index = producers[var]
        if eqn.primitive.name == "name":
            return var, eqn.params["name"]
        if eqn.primitive.name == "reduce_precision" and _changes_nothing(eqn):
            var = eqn.invars[0]
            continue
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
        if eqn.primitive.name in ("scan", "shard_map") or not isinstance(
            inner, core.Jaxpr
        ):  # those two change what they pass on
            return var, None
        if (len(inner.invars), len(inner.outvars)) != (len(eqn.invars), len(eqn.outvars)):
            return var, None
        place, name = origin(inner, inner.outvars[index])
        if place not in inner.invars:
            return (
                eqn.outvars[[origin(inner, out)[0] for out in inner.outvars].index(place)]
                if isinstance(place, core.Var)
                else var
            ), name
        var = eqn.invars[inner.invars.index(place)]
    return var, None


def _changes_nothing(eqn: Any) -> bool:
    """Whether it rounds to the precision that a value has already, as `jax.checkpoint` does with what it keeps."""
    of = jnp.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (of.nexp, of.nmant)
