"""Proves that an optimizer's update treats each row of the first axis by itself, so that it may run on some rows."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import export
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

# Primitives by rule. "elementwise": one element of each operand gives one element of the result. "any": rearrangements
# of the operands, and calls, whose own jaxprs are checked. Otherwise the parameter with the axes that are mixed or
# numbered; elements of other axes are not.
_RULES = {
    name: rule
    for rule, names in {
        "elementwise": """
            abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
            conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge
            gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul name ne
            neg nextafter not or pcast pmax pmin polygamma population_count pow psum psum_invariant pvary real
            reduce_precision regularized_incomplete_beta rem round rsqrt select_n sharding_constraint shift_left
            shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
        """,
        "any": """
            broadcast_in_dim device_put optimization_barrier squeeze transpose
            jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint remat2 cond
            while scan
        """,
        "axes": "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin",
        "axis": "cumsum cumprod cummax cummin cumlogsumexp",
        "dimension": "sort concatenate iota",
        "dimensions": "rev",
    }.items()
    for name in names.split()
}
_ADVICE = (
    "Call such a transformation (optax.clip_by_global_norm) on the gradients before apply, outside streamed; give "
    "arrays "
    "that need it (optax.lamb, optax.contrib.muon) an optimizer of their own; or call tx.update yourself, and only "
    "keep "
    "its state on the host, by offload_state."
)


def check_rows(update: Callable[..., Any], whole: ClosedJaxpr, args: Sequence[Any], stacks: Sequence[Any]) -> None:
    """Raises a ValueError unless row r of update's results depends on row r of its arguments only.

    Nor on r or the number of rows. update is traced with a symbol for each stack's number of rows
    (`jax.export.symbolic_shape`): in the jaxpr an axis of length "n0" holds the rows of the first stack. Each equation
    must be known to keep rows apart.

    Args:
      update: returns trees like its first arguments.
      whole: its jaxpr for args; with Python code that compares lengths (`p.shape[0] == vocabulary`) it differs.
      args: trees of `jax.ShapeDtypeStruct`.
      stacks: for each argument a tree with the name of each array's stack, "" for none. Stacks of one name have the
        same rows.
    """
    names = sorted({name for name in jax.tree.leaves(stacks) if name})
    if not names:
        return
    rows = dict(zip(names, export.symbolic_shape(", ".join(f"n{i}" for i in range(len(names)))), strict=True))

    def symbolic(x: jax.ShapeDtypeStruct, name: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows[name], *x.shape[1:]), x.dtype, weak_type=x.weak_type) if name else x

    types = [jax.tree.map(symbolic, *pair) for pair in zip(args, stacks, strict=True)]
    try:
        jaxpr, results = jax.make_jaxpr(update, return_shape=True)(*types)
    except (TypeError, ValueError, jax.errors.InconclusiveDimensionOperation) as error:
        raise ValueError(
            "tx.update mixes parameters, or uses the length of a first axis, of which it would see only pieces "
            f"({str(error).splitlines()[0]}). {_ADVICE}"
        ) from error
    stack_of = {str(symbol): name for name, symbol in rows.items()}
    for eqn in _equations(jaxpr.jaxpr):
        if not _keeps_rows(eqn, stack_of):
            mixed = {stack_of[n] for var in (*eqn.invars, *eqn.outvars) for n in _symbols(var) if n in stack_of}
            of = f"{' and '.join(sorted(mixed))} along the first axis" if mixed else "the length of a first axis"
            raise ValueError(
                f"tx.update is not elementwise: it takes a {eqn.primitive.name} of {of}, and would see only pieces. "
                f"{_ADVICE}"
            )
    if _outline(whole) != _outline(jaxpr):
        raise ValueError(
            "tx.update does one thing for whole arrays and another for pieces of them: it, or a mask, compares their "
            f"shapes. {_ADVICE}"
        )
    for wanted, result in zip(types, results, strict=False):
        for (path, x), y in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(result), strict=True):
            if x.shape != y.shape:
                where = jax.tree_util.keystr(path)
                raise ValueError(f"tx.update returns rows of another parameter, or another axis, at {where}. {_ADVICE}")


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _equations(inner)


def _outline(closed: ClosedJaxpr) -> list[tuple[str, list[str]]]:
    """What does not depend on shapes: the primitives, and the literals among their operands."""
    return [
        (eqn.primitive.name, [str(var.val) for var in eqn.invars if isinstance(var, Literal)])
        for eqn in _equations(closed.jaxpr)
    ]


def _shape(var: Any) -> tuple[Any, ...]:
    return getattr(var.aval, "shape", ())


def _axes(var: Any) -> list[int]:
    """The axes of symbolic length."""
    return [axis for axis, n in enumerate(_shape(var)) if not isinstance(n, int)]


def _symbols(var: Any) -> list[str]:
    return [str(_shape(var)[axis]) for axis in _axes(var)]


def _keeps_rows(eqn: Any, stack_of: Mapping[str, str]) -> bool:
    name, params = eqn.primitive.name, eqn.params
    if name == "dim_as_value":  # the number of rows, as a scalar
        return False
    if name == "scan" and not isinstance(params["length"], int):
        return False
    stacked = [var for var in (*eqn.invars, *eqn.outvars) if _axes(var)]
    if any(len(_axes(var)) > 1 or _symbols(var)[0] not in stack_of for var in stacked):
        return False
    rule = _RULES.get(name)
    if not stacked or rule == "any":
        return True
    if rule == "elementwise":
        rows_of = lambda var: (len(_shape(var)), _axes(var), _symbols(var))  # other axes may be broadcast
        return all(rows_of(var) == rows_of(eqn.outvars[0]) for var in stacked)
    if rule is not None:
        mixed = params[rule] if isinstance(params[rule], (tuple, list)) else (params[rule],)
        return not any(axis in mixed for var in eqn.invars or stacked for axis in _axes(var))
    if name == "dot_general":
        contracted, _ = params["dimension_numbers"]
        return not any(axis in axes for var, axes in zip(eqn.invars, contracted, strict=True) for axis in _axes(var))
    operand, out = eqn.invars[0], eqn.outvars[0]
    if name == "reshape":
        before, after = (_shape(var)[: _axes(var)[0]] for var in (operand, out))
        return math.prod(before) == math.prod(after)
    # A slice with as many rows as its operand is of other axes.
    return name in ("slice", "dynamic_slice") and _axes(operand) == _axes(out)
