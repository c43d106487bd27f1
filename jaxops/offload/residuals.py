"""Names of residuals: those of jaxops, errors for unknown ones, and the sizes of named values."""

import collections
import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxops.described import functions

CARRY = "carry"  # a layer's input in `jaxops.offload.scan`
# Of jaxops.nn's own values, which no op has.
OF_LAYERS = ("modulation.out", "router.logits", "shared_experts.token_gate")


def of_jaxops() -> tuple[str, ...]:
    """The residual names of jaxops' ops and layers. A test compares them with docs/residual_names.md."""
    return (*(name for function in functions() for name in function.residuals), *OF_LAYERS)


def covers(names: Iterable[str], name: str) -> bool:
    """Whether name is one of names, or continues one of them after a dot."""
    return any(name == known or name.startswith(known + ".") for known in names)


def unknown(names: Sequence[str], seen: Iterable[str]) -> list[str]:
    """Names that cover neither a value in seen nor a name of jaxops: one policy may serve layers that differ."""
    known = {*seen, *of_jaxops(), CARRY}
    return [name for name in names if not any(covers((name,), other) for other in known)]


def check_known(names: Sequence[str], seen: Iterable[str], of: str) -> None:
    seen = sorted(seen)
    if wrong := unknown(names, seen):
        raise ValueError(
            f"the policy names {wrong[0]!r}, but no value of {of} is called so."
            f"{did_you_mean(wrong[0], (*seen, *of_jaxops(), CARRY))} Its names are {', '.join(seen) or 'none at all'}; "
            f"{CARRY!r} is a layer's input in jaxops.offload.scan; docs/residual_names.md lists jaxops' own."
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the closest known name or prefix before a dot; empty if none is close."""
    near = difflib.get_close_matches(name, [*known, *(other.partition(".")[0] for other in known)], 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def residual_bytes(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Bytes of the named values in `function(*args)` and its residuals, over all iterations of loops.

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
    """(the variable that a value comes from through calls that only pass it on, its name or None)."""
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
    """Whether it rounds to its operand's own precision, as `jax.checkpoint` does with kept values."""
    of = jnp.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (of.nexp, of.nmant)
