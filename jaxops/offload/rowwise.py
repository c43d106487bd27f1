"""Proves that an optimizer's update treats each row of the first axis by itself, so that it may run on some rows."""

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params
from jax.tree_util import keystr

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
    "arrays that need it (optax.lamb, optax.contrib.muon) an optimizer of their own; or call tx.update yourself, and "
    "only keep its state on the host, by offload_state."
)


def check_update(tx: Any, params: Any, state: Any, grads: Any) -> None:
    """Raises a ValueError unless row r of what tx.update returns depends on row r of its arguments only.

    Nor on r or the number of rows. Arrays of one shape are cut into the same rows, so they may be mixed. tx.update is
    traced with a symbol for each shape's number of rows (`jax.export.symbolic_shape`): in the jaxpr an axis of length
    "n0" holds the rows of the first shape. Each equation must be known to keep rows apart. Structures, shapes and the
    state's dtypes must stay.
    """
    structure = jax.tree.structure
    if structure(grads) != structure(params):
        raise ValueError(
            f"grads have the structure {structure(grads)}, but params {structure(params)}: pass equal ones."
        )
    if structure(state) != (of_init := structure(jax.eval_shape(tx.init, params))):
        raise ValueError(f"state has the structure {structure(state)}, but tx.init(params) {of_init}: pass that.")
    paths: dict[tuple[int, ...], list[str]] = collections.defaultdict(list)
    for path, x in jax.tree.leaves_with_path(params):
        if x.ndim and x.shape[0]:
            paths[x.shape].append(f"params{keystr(path)}")
    names = {
        shape: first if not others else f"{first} (or another {list(shape)})"
        for shape, (first, *others) in paths.items()
    }
    for path, x in jax.tree.leaves_with_path(state):
        if (x.ndim and x.shape[0] and x.shape not in names) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"state{keystr(path)} is {x.dtype}{list(x.shape)}, neither a number nor of the shape of a parameter: "
                "pass init(params) of the same parameters. A transformation that keeps other arrays (optax.adafactor, "
                "optax.add_noise) is not elementwise."
            )
    update = lambda params, state, grads: tx.update(grads, state, params)
    types = jax.tree.map(lambda x: _type(x, x.shape), (params, state, grads))
    whole, results = jax.make_jaxpr(update, return_shape=True)(*types)
    for name, old, new in zip(("updates", "state"), types, results, strict=False):
        if structure(old) != structure(new):
            raise ValueError(
                f"tx.update returns {name} of the structure {structure(new)}; it must be {structure(old)}."
            )
        for (path, x), y in zip(jax.tree.leaves_with_path(old), jax.tree.leaves(new), strict=True):
            if x.shape != y.shape or (name == "state" and x.dtype != y.dtype):
                was, now = (f"{z.dtype}{list(z.shape)}" for z in (x, y))
                raise ValueError(
                    f"tx.update makes {name}{keystr(path)} {now}; it must be {was}. If only the dtype differs, cast "
                    "the gradients to the parameters', or call init with the parameters in float32."
                )
    if names:
        _check_rows(update, whole, types, names)


def _type(x: Any, shape: Sequence[Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=jax.typeof(x).weak_type)


def _check_rows(
    update: Callable[..., Any], whole: ClosedJaxpr, types: Sequence[Any], names: Mapping[tuple[int, ...], str]
) -> None:
    """
    Args:
      whole: update's jaxpr for types; with Python code that compares lengths (`p.shape[0] == vocabulary`) another one.
      names: the shapes with rows, and how errors name their arrays.
    """
    rows = dict(zip(names, export.symbolic_shape(", ".join(f"n{i}" for i in range(len(names)))), strict=True))
    symbolic = jax.tree.map(lambda x: _type(x, (rows[x.shape], *x.shape[1:]) if x.shape in rows else x.shape), types)
    try:
        jaxpr, results = jax.make_jaxpr(update, return_shape=True)(*symbolic)
    except (TypeError, ValueError, jax.errors.InconclusiveDimensionOperation) as error:
        raise ValueError(
            "tx.update mixes parameters, or uses the length of a first axis, of which it would see only pieces "
            f"({str(error).splitlines()[0]}). {_ADVICE}"
        ) from error
    name_of = {str(symbol): names[shape] for shape, symbol in rows.items()}
    for eqn in _equations(jaxpr.jaxpr):
        if not _keeps_rows(eqn, name_of):
            mixed = {name_of[n] for var in (*eqn.invars, *eqn.outvars) for n in _symbols(var) if n in name_of}
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
    for wanted, result in zip(symbolic, results, strict=False):
        for (path, x), y in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(result), strict=True):
            if x.shape != y.shape:
                raise ValueError(
                    f"tx.update returns rows of another parameter, or another axis, at {keystr(path)}. {_ADVICE}"
                )


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


def _keeps_rows(eqn: Any, name_of: Mapping[str, str]) -> bool:
    name, params = eqn.primitive.name, eqn.params
    if name == "dim_as_value":  # the number of rows, as a scalar
        return False
    if name == "scan" and not isinstance(params["length"], int):
        return False
    stacked = [var for var in (*eqn.invars, *eqn.outvars) if _axes(var)]
    if any(len(_axes(var)) > 1 or _symbols(var)[0] not in name_of for var in stacked):
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
