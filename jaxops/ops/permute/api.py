"""The public functions: checks, then the custom_vjps. Each gradient is made of these ops again, so every order
exists."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.arrays.checks import (
    check_array,
    check_exact,
    check_float,
    check_offsets,
    check_size,
    float_dtype,
    type_name,
)
from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.symbolic import below
from jaxops._lib.numerics.fp8 import Quantized
from jaxops.ops.permute.kernels_pallas import combine_bwd_pallas, combine_pallas, permute_pallas
from jaxops.ops.permute.plan import PLANNER, Plan, Problem
from jaxops.ops.permute.xla import combine_bwd_xla, combine_xla, permute_xla
from jaxops.ops.route import Routing, partial_routing

_MAX_ROWS = 2**31  # row numbers are int32


def permute(x: jax.Array, routing: Routing, *, backend: str = "auto", plan: Plan | None = None) -> jax.Array:
    """Copies each token's row to the rows of its choices, the experts' input: `rows[r] = x[row_indices[r]]`.

    Rows outside all groups (before `group_offsets[0]`, from `group_offsets[-1]` on) are zeros, so a device that holds
    some of the experts passes a Routing with its slice of the offsets. Differentiable (reverse mode, any order) in x:
    `dx[t] = sum_j drows[row_positions[t, j]]`, summed in float32. Deterministic.

    >>> import jax.numpy as jnp, jaxops
    >>> routing = jaxops.route(jnp.array([[2., 0., 1.], [0., 3., 3.]]), 2)  # tokens to experts 0 and 2, and 1 and 2
    >>> jaxops.permute(jnp.array([[10.], [20.]]), routing)[:, 0]
    Array([10., 20., 10., 20.], dtype=float32)

    Args:
      x: [T, D], bfloat16, float16 or float32.
      routing: of the same T tokens, from `route`. row_positions and row_indices that disagree give wrong rows, never an
        access out of bounds.
      backend: "auto" takes the Pallas kernels on a GPU, XLA on CPU and TPU; "pallas" (interpreted on a CPU) or "xla"
        runs or raises.
      plan: a `Plan` instead of the tuned or heuristic one.

    Returns:
      [T * k, D] in x's dtype, sorted by expert.

    Raises:
      ValueError: shapes that do not fit together, an unknown backend.
      TypeError: a routing that is not a `Routing`, dtypes that the kernels do not take; forward-mode differentiation
        (JAX's own error).

    Residuals: "permute.rows" (checkpoint names).

    Source: the permutation of Megatron's and TransformerEngine's MoE layers; MegaBlocks' gather (Gale et al. 2022,
    arXiv:2211.15841).
    """
    check_float("x", x, "[T, D]")
    routing = check_routing(routing, weights=False)
    T, k = routing.row_positions.shape
    check_size("x's number of rows", x.shape[0], "T of routing.row_positions", T)
    problem = Problem(T, x.shape[1], k, jnp.dtype(x.dtype).name)
    return _permute(*PLANNER.prepare(problem, backend, plan, x, routing))


def permute_within_groups(x: jax.Array, routing: Routing, *, plan: Plan) -> jax.Array:
    """`permute` that leaves rows outside all groups uninitialised, for ops that read rows of groups only.

    A device with half of the experts writes half as much. Nothing is checked, `make_plan` has filled the plan, and
    there is no gradient.
    """
    return _permute_forward(plan, x, routing, clear=False)


def sum_of_rows(rows: jax.Array, routing: Routing) -> jax.Array:
    """`permute`, transposed: from rows [R, D] to [T, D], `out[t] = sum_j rows[row_positions[t, j]]`, in float32,
    rounded once to rows' dtype.

    Differentiable as `permute`. Nothing is checked.
    """
    T, k = routing.row_positions.shape
    problem = Problem(T, rows.shape[1], k, jnp.dtype(rows.dtype).name)
    plan, rows, routing = PLANNER.prepare(problem, "auto", None, rows, routing)
    return _combine(plan, rows.dtype.name, rows, routing)


def permute_quantized(q: Quantized, routing: Routing, *, plan: Plan) -> Quantized:
    """The row layout of `permute`'s rows, from the tokens' row layout: FP8 values and their scales are copied, where a
    cast of the rows would read and cast each token once a choice.

    Rows outside all groups are unspecified. Nothing is checked, `make_plan` has filled the plan, and there is no
    gradient.

    Args:
      q: of the tokens [T, D], with scales "tensorwise", "rowwise" or "block_1x128".
    """
    values, scales = q.values, q.scales
    assert values is not None  # the row layout
    assert scales is not None
    T, D = values.shape
    # Copied as integers, in pairs where that is possible: a copy of float numbers may change the bits of a NaN.
    words = values.reshape(T, D // 2, 2) if D % 2 == 0 else values
    rows = permute_within_groups(_bits(words, jnp.int16 if D % 2 == 0 else jnp.int8), routing, plan=plan)
    values = _bits(rows, values.dtype).reshape(-1, D)
    if q.scaling != "tensorwise":
        scales = jnp.take(scales, routing.row_indices, axis=-1, mode="clip")
    return dataclasses.replace(q, values=values, scales=scales, values_t=None, scales_t=None)


def _bits(x: jax.Array, dtype) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype)


def combine(
    rows: jax.Array, routing: Routing, *, out_dtype=None, backend: str = "auto", plan: Plan | None = None
) -> jax.Array:
    """Adds up the experts' outputs of each token with the router's weights, in float32:
    `out[t] = sum_j weights[t, j] * rows[row_positions[t, j]]`.

    A choice that the capacity dropped, or whose row lies outside all groups, contributes nothing; rows outside the
    groups have zero gradients, whatever they contain (NaN included). So the results of devices with slices of
    `group_offsets` add up to the whole. Differentiable (reverse mode, any order) in rows and routing.weights.
    Deterministic: no atomics.

    >>> import jax.numpy as jnp, jaxops
    >>> routing = jaxops.route(jnp.array([[2., 2., 0.], [0., 3., 3.]]), 2)  # all weights are 0.5
    >>> jaxops.combine(jnp.array([[1.], [10.], [3.], [5.]]), routing)[:, 0]  # rows 0 and 1, rows 2 and 3
    Array([5.5, 4. ], dtype=float32)

    Args:
      rows: [T * k, D], bfloat16, float16 or float32, in the order of `permute`.
      routing: as in `permute`; its weights are float32.
      out_dtype: bfloat16, float16 or float32; rows.dtype by default.
      backend, plan: as in `permute`.

    Returns:
      [T, D] in out_dtype.

    Raises:
      ValueError, TypeError: as `permute`.

    Residuals: "combine.out" (checkpoint names).

    Source: the unpermutation of Megatron's and TransformerEngine's MoE layers, with the weights; MegaBlocks' scatter.
    """
    check_float("rows", rows, "[T * k, D]")
    routing = check_routing(routing)
    T, k = routing.row_positions.shape
    check_size("the number of rows", rows.shape[0], "T * k of routing.row_positions", T * k)
    out = float_dtype("out_dtype", rows.dtype if out_dtype is None else out_dtype).name
    problem = Problem(T, rows.shape[1], k, jnp.dtype(rows.dtype).name)
    plan, rows, routing = PLANNER.prepare(problem, backend, plan, rows, routing)
    return _combine(plan, out, rows, routing)


def check_routing(routing: Routing, *, weights: bool = True) -> Routing:
    """The fields that permute and combine (and ops made of them) read, checked; without the other fields."""
    if not isinstance(routing, Routing):
        raise TypeError(f"routing is {type_name(routing)}; pass the jaxops.Routing that jaxops.route returned.")
    positions = routing.row_positions
    check_array("routing.row_positions", positions, "the row_positions [T, k] of a Routing")
    if len(positions.shape) != 2:
        given = f"routing.row_positions has shape {tuple(positions.shape)}"
        raise ValueError(f"{given}; it must be [T, k]. For a stack of routings, use jax.vmap.")
    T, k = positions.shape
    names = ("row_positions", "row_indices", "weights") if weights else ("row_positions", "row_indices")
    for name in names:
        dtype = "float32" if name == "weights" else "int32"
        axes, shape = ("[T * k]", (T * k,)) if name == "row_indices" else ("[T, k]", (T, k))
        check_exact(f"routing.{name}", getattr(routing, name), dtype, axes, shape, f"as row_positions are {(T, k)}")
    check_offsets(routing.group_offsets, "routing.group_offsets")
    if not below(T * k, _MAX_ROWS):
        given = f"{T} tokens with {k} choices are {T * k} rows"
        raise ValueError(f"{given}; fewer than 2**31 are possible (int32 row numbers): take the tokens in parts.")
    return partial_routing(**{name: getattr(routing, name) for name in (*names, "group_offsets")})


def _permute_forward(plan: Plan, x: jax.Array, routing: Routing, *, clear: bool = True) -> Any:
    if plan.backend == "xla" or 0 in (*x.shape, routing.row_indices.shape[0]):
        return permute_xla(x, routing)
    assert plan.permute is not None  # make_plan fills it
    return permute_pallas(plan.permute, x, routing, clear=clear, interpret=plan.on.interpret)


def _permute_fwd(plan: Plan, x: jax.Array, routing: Routing):
    return checkpoint_name(_permute(plan, x, routing), "permute.rows"), routing


def _permute_bwd(plan: Plan, routing: Routing, drows: jax.Array):
    return _combine(plan, drows.dtype.name, drows, routing), None


def _combine_forward(plan: Plan, out_dtype: str, rows: jax.Array, routing: Routing) -> Any:
    """Without weights the rows are added up: permute, transposed."""
    if plan.backend == "xla" or rows.size == 0:
        return combine_xla(rows, routing, out_dtype)
    assert plan.combine is not None  # make_plan fills it
    return combine_pallas(plan.combine, rows, routing, out_dtype, interpret=plan.on.interpret)


def _combine_fwd(plan: Plan, out_dtype: str, rows: jax.Array, routing: Routing):
    out = _combine(plan, out_dtype, rows, routing)
    if routing.weights is None:
        return out, (None, routing)
    return checkpoint_name(out, "combine.out"), (rows, routing)


def _combine_bwd(plan: Plan, out_dtype: str, residuals, dout: jax.Array):
    rows, routing = residuals
    if routing.weights is None:
        return _permute(plan, dout, routing), None
    drows, dweights = _gradients(plan, rows, routing, dout)
    return drows, partial_routing(weights=dweights)


def _gradients_forward(plan: Plan, rows: jax.Array, routing: Routing, dout: jax.Array) -> Any:
    """The gradients of `_combine`: drows in rows' dtype, and dweights."""
    if plan.backend == "xla" or rows.size == 0:
        return combine_bwd_xla(rows, routing, dout)
    assert plan.combine_bwd is not None  # make_plan fills it
    return combine_bwd_pallas(plan.combine_bwd, rows, routing, dout, interpret=plan.on.interpret)


def _gradients_fwd(plan: Plan, *operands):
    return _gradients(plan, *operands), operands


def _gradients_bwd(plan: Plan, operands, cotangents):
    """drows is weights times dout, dweights rows times dout. The gradient of each product is the same product with a
    cotangent in place of a factor."""
    rows, routing, dout = operands
    rows_cotangent, weights_cotangent = cotangents
    from_weights = dataclasses.replace(routing, weights=weights_cotangent)
    drows, dweights = _gradients(plan, rows_cotangent, from_weights, dout)
    ddout = _combine(plan, "float32", rows_cotangent, routing) + _combine(plan, "float32", rows, from_weights)
    return drows, partial_routing(weights=dweights), ddout.astype(dout.dtype)


_permute = differentiable(_permute_forward, _permute_fwd, _permute_bwd, static=1)
_combine = differentiable(_combine_forward, _combine_fwd, _combine_bwd, static=2)
_gradients = differentiable(_gradients_forward, _gradients_fwd, _gradients_bwd, static=1)
