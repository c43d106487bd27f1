"""The names of residuals: their sizes, and a name for all residuals of a function."""

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
    """`function`, with every value that its backward reads called `name`: arguments, results and intermediates.

    For functions whose residuals have no names, such as cuDNN attention with its softmax statistics. A policy that
    keeps or offloads `name` recomputes nothing of the function.

    Args:
      function: takes arrays as positional arguments. Arrays that it closes over get no gradient.

    Raises:
      TypeError, ValueError: a name that is no string, or empty.
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


def residual_bytes(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Bytes of the named values in `function(*args)` and its residuals; in a loop, the bytes of all iterations.

    `args` are arrays or `jax.ShapeDtypeStruct`s; nothing is computed.
    """
    return count_names(jax.make_jaxpr(lambda *args: jax.vjp(function, *args))(*args).jaxpr)


def count_names(jaxpr: Any) -> dict[str, int]:
    """Bytes by name of all named values in a jaxpr and in the jaxprs inside it."""
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
    """(the variable that a value comes from, its name or None), followed through calls that only pass it on.

    Equal for equal values; one of the jaxpr's `invars` for a value that is only passed on.
    """
    producers = {out: (eqn, i) for eqn in jaxpr.eqns for i, out in enumerate(eqn.outvars)}
    while isinstance(var, core.Var) and var in producers:
        eqn, index = producers[var]
        if eqn.primitive.name == "name":
            return var, eqn.params["name"]
        if eqn.primitive.name == "reduce_precision" and _is_identity(eqn):
            var = eqn.invars[0]
            continue
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
        # scan and shard_map change the shapes of what they pass on.
        if not isinstance(inner, core.Jaxpr) or eqn.primitive.name in ("scan", "shard_map"):
            return var, None
        if (len(inner.invars), len(inner.outvars)) != (len(eqn.invars), len(eqn.outvars)):
            return var, None
        source, name = origin(inner, inner.outvars[index])
        if source not in inner.invars:
            if isinstance(source, core.Var):
                var = eqn.outvars[[origin(inner, out)[0] for out in inner.outvars].index(source)]
            return var, name
        var = eqn.invars[inner.invars.index(source)]
    return var, None


def _is_identity(eqn: Any) -> bool:
    """Whether it rounds to the precision that its operand has, as `jax.checkpoint` does with the values it keeps."""
    of = jnp.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (of.nexp, of.nmant)
