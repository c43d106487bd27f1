"""The public functions: checks, then the custom_vjps that wire the passes together. Each gradient is one of these again, so there are some of any order."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.checks import check_array, check_float, check_offsets, check_size, float_dtype
from jaxops._lib.device import device_of
from jaxops._lib.differentiable import differentiable
from jaxops._lib.manual_axes import vary_together
from jaxops.ops.permute.combine_bwd_pallas import combine_bwd_pallas
from jaxops.ops.permute.combine_pallas import combine_pallas
from jaxops.ops.permute.permute_pallas import permute_pallas
from jaxops.ops.permute.places import Places
from jaxops.ops.permute.plan import Plan, Problem, make_plan
from jaxops.ops.permute.xla import combine_gradient_xla, combine_xla, permute_xla
from jaxops.ops.route import Routing

_MOST_ROWS = 2**31  # row numbers are int32


def permute(x: jax.Array, routing: Routing, *, backend: str = "auto", plan: Plan | None = None) -> jax.Array:
    """Copies each token's row to the rows of its choices: what the experts' grouped product reads. `rows[r] = x[row_indices[r]]`.

    Rows outside all groups (before `group_offsets[0]`, from `group_offsets[-1]` on) come out zero, so a device that holds some of the experts passes a Routing
    with its slice of the offsets. Differentiable (reverse mode, any order) in x: `dx[t] = sum_j drows[row_positions[t, j]]`, in float32. Deterministic.

    >>> import jax.numpy as jnp, jaxops
    >>> routing = jaxops.route(jnp.array([[2., 0., 1.], [0., 3., 3.]]), 2)  # token 0 to experts 0 and 2, token 1 to experts 1 and 2
    >>> jaxops.permute(jnp.array([[10., 11.], [20., 21.]]), routing)
    Array([[10., 11.],
           [20., 21.],
           [10., 11.],
           [20., 21.]], dtype=float32)

    Args:
      x: [T, D], bfloat16, float16 or float32.
      routing: of the same T tokens, from `route`. Its row_positions and row_indices must tell the same; those that do not give wrong rows, never an access
        out of bounds.
      backend: "auto" takes the Pallas kernels on a GPU and plain XLA on CPU and TPU; "pallas" (interpreted on a CPU) or "xla" runs or raises.
      plan: a `Plan`, instead of the heuristic one.

    Returns:
      [T * k, D] in x's dtype, sorted by expert.

    Raises:
      ValueError: shapes that do not fit together, an unknown backend.
      TypeError: a routing that is no `Routing`, dtypes that the kernels do not take; forward-mode differentiation (JAX's own error).

    Residuals: named "permute.rows" (checkpoint names).

    Source: the permutation of Megatron's and TransformerEngine's MoE layers; MegaBlocks (Gale et al. 2022, arXiv:2211.15841) calls it gather.
    """
    check_float("x", x, "[T, D]")
    places = _check_places(routing)
    T, k = places.positions.shape
    check_size("x's number of rows", x.shape[0], "T of routing.row_positions", T)
    plan = make_plan(
        Problem(T, x.shape[1], k, jnp.dtype(x.dtype).name), device_of(x, routing), backend=backend, plan=plan
    )
    x, *fields = vary_together(x, *places)
    return _permute(plan, x, Places(*fields))


def combine(
    rows: jax.Array, routing: Routing, *, out_dtype=None, backend: str = "auto", plan: Plan | None = None
) -> jax.Array:
    """Adds up what the experts made of each token, with the router's weights: `out[t] = sum_j weights[t, j] * rows[row_positions[t, j]]`, in float32.

    A choice that capacity dropped, or whose row lies outside all groups, contributes nothing, and rows outside have no gradient, whatever they hold, NaN too.
    So the sums that devices make, each with its slice of `group_offsets`, add up to the whole. Differentiable (reverse mode, any order) in rows and in
    routing.weights, and through these in the router's logits. Deterministic: no atomics.

    >>> import jax.numpy as jnp, jaxops
    >>> routing = jaxops.route(jnp.array([[2., 2., 0.], [0., 3., 3.]]), 2)  # all weights are a half
    >>> jaxops.combine(jnp.array([[1., 2.], [10., 20.], [3., 4.], [5., 6.]]), routing)  # token 0's rows are 0 and 1, token 1's are 2 and 3
    Array([[ 5.5, 11. ],
           [ 4. ,  5. ]], dtype=float32)

    Args:
      rows: [T * k, D], bfloat16, float16 or float32, as `permute` orders them.
      routing: as in `permute`; its weights are float32.
      out_dtype: bfloat16, float16 or float32; rows.dtype by default.
      backend: as in `permute`.
      plan: as in `permute`.

    Returns:
      [T, D] in out_dtype.

    Raises:
      ValueError: shapes that do not fit together, an unknown backend.
      TypeError: a routing that is no `Routing`, dtypes that the kernels do not take; forward-mode differentiation (JAX's own error).

    Residuals: named "combine.out" (checkpoint names).

    Source: the unpermutation of Megatron's and TransformerEngine's MoE layers, with the weights; MegaBlocks calls it scatter.
    """
    check_float("rows", rows, "[T * k, D]")
    places = check_routing(routing)
    T, k = places.positions.shape
    check_size("the number of rows", rows.shape[0], "T * k of routing.row_positions", T * k)
    out = float_dtype("out_dtype", rows.dtype if out_dtype is None else out_dtype).name
    plan = make_plan(
        Problem(T, rows.shape[1], k, jnp.dtype(rows.dtype).name), device_of(rows, routing), backend=backend, plan=plan
    )
    rows, weights, *fields = vary_together(rows, routing.weights, *places)
    return _combine(plan, out, rows, weights, Places(*fields))


def check_routing(routing: Routing) -> Places:
    """What `combine` reads of a routing is there, and fits together. For ops that build on this one."""
    places = _check_places(routing)
    check_array("routing.weights", routing.weights, "the weights [T, k] of a Routing")
    if routing.weights.shape != places.positions.shape:
        raise ValueError(
            f"routing.weights has shape {tuple(routing.weights.shape)}; it must be that of routing.row_positions, {tuple(places.positions.shape)}."
        )
    if routing.weights.dtype != jnp.float32:
        raise TypeError(f"routing.weights is {routing.weights.dtype}; write routing.weights.astype(jnp.float32).")
    return places


def _check_places(routing: Routing) -> Places:
    if not isinstance(routing, Routing):
        raise TypeError(f"routing is a {type(routing).__name__}; pass the jaxops.Routing that jaxops.route returned.")
    places = Places(routing.row_positions, routing.row_indices, routing.group_offsets)
    for name, array, shape in (
        ("row_positions", places.positions, "[T, k]"),
        ("row_indices", places.indices, "[T * k]"),
    ):
        check_array(f"routing.{name}", array, f"the {name} {shape} of a Routing")
        if array.dtype != jnp.int32:
            raise TypeError(f"routing.{name} is {array.dtype}; write routing.{name}.astype(jnp.int32).")
    check_offsets(places.offsets, "routing.group_offsets")
    if len(places.positions.shape) != 2:
        raise ValueError(
            f"routing.row_positions has shape {tuple(places.positions.shape)}; it must be [T, k]. Of a stack of routings, use jax.vmap."
        )
    T, k = places.positions.shape
    if tuple(places.indices.shape) != (T * k,):
        raise ValueError(
            f"routing.row_indices has shape {tuple(places.indices.shape)}; it must be [T * k] = ({T * k},), as row_positions are {(T, k)}."
        )
    if T * k >= _MOST_ROWS:
        raise ValueError(
            f"{T} tokens with {k} choices are {T * k} rows; row numbers are int32, so fewer than 2**31 are possible: take the tokens in parts."
        )
    return places


def _permute_forward(plan: Plan, x: jax.Array, places: Places) -> Any:
    R, D = places.indices.shape[0], x.shape[1]
    if R * D == 0:
        return jnp.zeros((R, D), x.dtype)
    if plan.backend == "xla":
        return permute_xla(x, places)
    assert plan.permute is not None  # make_plan fills it
    return permute_pallas(plan.permute, x, places, interpret=plan.on.interpret)


def _permute_fwd(plan: Plan, x: jax.Array, places: Places):
    return checkpoint_name(_permute(plan, x, places), "permute.rows"), places


def _permute_bwd(plan: Plan, places: Places, drows: jax.Array):
    return _add(plan, drows, places), None


def _add_forward(plan: Plan, rows: jax.Array, places: Places) -> Any:
    """`_permute`, transposed."""
    return _sum(plan, rows.dtype, rows, None, places)


def _add_fwd(plan: Plan, rows: jax.Array, places: Places):
    return _add(plan, rows, places), places


def _add_bwd(plan: Plan, places: Places, dout: jax.Array):
    return _permute(plan, dout, places), None


def _sum(plan: Plan, out_dtype, rows: jax.Array, weights: jax.Array | None, places: Places) -> jax.Array:
    if rows.size == 0:
        return jnp.zeros((places.positions.shape[0], rows.shape[1]), out_dtype)
    if plan.backend == "xla":
        return combine_xla(rows, weights, places, out_dtype)
    assert plan.combine is not None  # make_plan fills it
    return combine_pallas(plan.combine, rows, weights, places, out_dtype, interpret=plan.on.interpret)


def _combine_forward(plan: Plan, out_dtype: str, rows: jax.Array, weights: jax.Array, places: Places) -> Any:
    return _sum(plan, out_dtype, rows, weights, places)


def _combine_fwd(plan: Plan, out_dtype: str, rows: jax.Array, weights: jax.Array, places: Places):
    return checkpoint_name(_combine(plan, out_dtype, rows, weights, places), "combine.out"), (rows, weights, places)


def _combine_bwd(plan: Plan, out_dtype: str, saved, dout: jax.Array):
    rows, weights, places = saved
    gradients: Any = _gradient(plan, rows, weights, dout, places)
    return *gradients, None


def _gradient_forward(plan: Plan, rows: jax.Array, weights: jax.Array, dout: jax.Array, places: Places) -> Any:
    """Of `_combine`: drows in rows' dtype, and dweights."""
    if rows.size == 0:
        return jnp.zeros_like(rows), jnp.zeros_like(weights)
    if plan.backend == "xla":
        return combine_gradient_xla(rows, weights, dout, places)
    assert plan.combine_bwd is not None  # make_plan fills it
    return combine_bwd_pallas(plan.combine_bwd, rows, weights, dout, places, interpret=plan.on.interpret)


def _gradient_fwd(plan: Plan, rows: jax.Array, weights: jax.Array, dout: jax.Array, places: Places):
    return _gradient(plan, rows, weights, dout, places), (rows, weights, dout, places)


def _gradient_bwd(plan: Plan, saved, cotangents):
    """drows is weights times dout, dweights rows times dout: of such products the gradients are the same products, with a cotangent in a factor's place."""
    rows, weights, dout, places = saved
    of_drows, of_dweights = cotangents
    of_factors: Any = _gradient(plan, of_drows, of_dweights, dout, places)
    from_drows: Any = _combine(plan, "float32", of_drows, weights, places)
    from_dweights: Any = _combine(plan, "float32", rows, of_dweights, places)
    return *of_factors, (from_drows + from_dweights).astype(dout.dtype), None


_permute = differentiable(_permute_forward, _permute_fwd, _permute_bwd, static=1)
_add = differentiable(_add_forward, _add_fwd, _add_bwd, static=1)
_combine = differentiable(_combine_forward, _combine_fwd, _combine_bwd, static=2)
_gradient = differentiable(_gradient_forward, _gradient_fwd, _gradient_bwd, static=1)
