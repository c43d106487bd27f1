"""Proves that an optimizer's update is elementwise, so that it may run on some rows of its arrays at a time."""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params
from jax.tree_util import keystr

# One element of each operand gives one element of the result.
_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
convert_element_type copy copy_p cos cosh device_put digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
igamma igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul name ne neg nextafter
not optimization_barrier or pcast pmax pmin polygamma population_count pow psum psum_invariant pvary real
reduce_precision regularized_incomplete_beta rem round rsqrt select_n sharding_constraint shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
# Their own jaxprs are checked.
_CALLS = """
jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint remat2 cond while scan
"""
_ALLOWED = frozenset(f"{_ELEMENTWISE} {_CALLS}".split())
_ADVICE = (
    "Call such a transformation (optax.clip_by_global_norm) on the gradients before apply, outside streamed; give "
    "arrays that need it (optax.lamb, optax.contrib.muon) an optimizer of their own; or call tx.update yourself, and "
    "only keep its state on the host, by offload_state."
)


def check_update(tx: Any, params: Any, state: Any, grads: Any) -> None:
    """Raises a ValueError unless each element that tx.update returns depends on the same element of its arguments, and
    on scalars, only.

    Not on the number of rows either: tx.update is traced with a symbol for each shape's first axis
    (`jax.export.symbolic_shape`), and each equation on arrays with such an axis must be known to be elementwise.
    Structures, shapes and the state's dtypes must stay.
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
    for path, x in jax.tree.leaves_with_path(state):
        if (x.ndim and x.shape[0] and x.shape not in paths) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"state{keystr(path)} is {x.dtype}{list(x.shape)}, neither a number nor of the shape of a parameter: "
                "pass init(params) of the same parameters. A transformation that keeps other arrays (optax.adafactor, "
                "optax.add_noise) is not elementwise."
            )
    update = lambda params, state, grads: tx.update(grads, state, params)
    types = jax.tree.map(lambda x: _type(x, x.shape), (params, state, grads))
    whole, results = jax.make_jaxpr(update, return_shape=True)(*types)
    _check_types(types, results)
    if paths:
        _check_rows(update, whole, types, paths)


def _type(x: Any, shape: Sequence[Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=jax.typeof(x).weak_type)


def _check_types(wanted: Sequence[Any], results: Sequence[Any]) -> None:
    """Updates must be like params, and the new state like the old one."""
    for name, old, new in zip(("updates", "state"), wanted, results, strict=False):
        if jax.tree.structure(old) != jax.tree.structure(new):
            raise ValueError(
                f"tx.update returns {name} of the structure {jax.tree.structure(new)}; it must be "
                f"{jax.tree.structure(old)}."
            )
        for (path, x), y in zip(jax.tree.leaves_with_path(old), jax.tree.leaves(new), strict=True):
            if x.shape != y.shape or (name == "state" and x.dtype != y.dtype):
                was, now = (f"{z.dtype}{list(z.shape)}" for z in (x, y))
                raise ValueError(
                    f"tx.update makes {name}{keystr(path)} {now}; it must be {was}. If only the dtype differs, cast "
                    "the gradients to the parameters', or call init with the parameters in float32."
                )


def _check_rows(
    update: Callable[..., Any], whole: ClosedJaxpr, types: Sequence[Any], paths: Mapping[tuple[int, ...], list[str]]
) -> None:
    """
    Args:
      whole: update's jaxpr for types; with Python code that compares lengths (`p.shape[0] == vocabulary`) another one.
      paths: the shapes with rows, and the parameters that have them.
    """
    rows = dict(zip(paths, export.symbolic_shape(", ".join(f"n{i}" for i in range(len(paths)))), strict=True))
    symbolic = jax.tree.map(lambda x: _type(x, (rows[x.shape], *x.shape[1:]) if x.shape in rows else x.shape), types)
    try:
        jaxpr, results = jax.make_jaxpr(update, return_shape=True)(*symbolic)
    except (TypeError, ValueError, jax.errors.InconclusiveDimensionOperation) as error:
        raise ValueError(
            "tx.update mixes parameters, or uses the length of a first axis, of which it would see only pieces "
            f"({str(error).splitlines()[0]}). {_ADVICE}"
        ) from error
    names = {str(rows[shape]): " or ".join(of_shape[:2]) for shape, of_shape in paths.items()}
    for eqn in _equations(jaxpr.jaxpr):
        if not _is_elementwise(eqn):
            mixed = {names[n] for var in (*eqn.invars, *eqn.outvars) for n in _symbols(var) if n in names}
            of = f"rows of {' and '.join(sorted(mixed))}" if mixed else "the number of rows"
            raise ValueError(
                f"tx.update is not elementwise: it takes a {eqn.primitive.name} of {of}, and would see only pieces. "
                f"{_ADVICE}"
            )
    if _outline(whole) != _outline(jaxpr):
        raise ValueError(
            "tx.update does one thing for whole arrays and another for pieces of them: it, or a mask, compares their "
            f"shapes. {_ADVICE}"
        )
    _check_types(symbolic, results)


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


def _symbols(var: Any) -> list[str]:
    """The symbols in its shape: of an array without rows, none."""
    return [str(n) for n in getattr(var.aval, "shape", ()) if not isinstance(n, int)]


def _is_elementwise(eqn: Any) -> bool:
    """Whether an equation keeps elements of arrays with rows apart."""
    name = eqn.primitive.name
    operands, results = ([var for var in of if _symbols(var)] for of in (eqn.invars, eqn.outvars))
    if name == "dim_as_value" or (name == "scan" and not isinstance(eqn.params["length"], int)):
        return False
    if name == "broadcast_in_dim":
        return not operands
    return not (operands or results) or name in _ALLOWED
