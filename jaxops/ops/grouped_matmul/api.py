"""The public functions: checks and plans. product.py has the custom_vjp."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.checks import (
    check_flag,
    check_float,
    check_groups,
    check_offsets,
    check_size,
    compute_dtype_of,
    float_dtype,
)
from jaxops._lib.arrays.precision import resolve_precision
from jaxops.ops.grouped_matmul.modalities import shapes_of
from jaxops.ops.grouped_matmul.plan import PLANNER, Plan, Problem
from jaxops.ops.grouped_matmul.product import Spec, matmul, wgrad


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_offsets: jax.Array,
    *,
    transpose_rhs: bool = False,
    bias: jax.Array | None = None,
    precision: lax.PrecisionLike = None,
    compute_dtype=None,
    out_dtype=None,
    backend: str = "auto",
    plan: Plan | None = None,
) -> jax.Array:
    """Multiplies each group of rows by its own matrix: `out[rows of g] = lhs[rows of g] @ rhs[g] + bias[g]`.

    Group g is the rows `group_offsets[g]` to `group_offsets[g + 1] - 1`. Groups may be empty and of any size. The
    offsets stay on the device; new values never recompile. Rows outside all groups are written as zeros; their input
    values (NaN included) affect no output and no gradient. Differentiable (reverse mode, any order) in lhs, rhs and
    bias; the gradients of an empty group are exactly zero. Deterministic.

    >>> import jax, jax.numpy as jnp, jaxops
    >>> tokens, experts = jnp.ones((6, 4)), jnp.stack([jnp.eye(4), 2 * jnp.eye(4), 3 * jnp.eye(4)])
    >>> offsets = jnp.array([0, 2, 2, 5], jnp.int32)  # expert 1 has no rows, row 5 has no expert
    >>> jaxops.grouped_matmul(tokens, experts, offsets)[:, 0]
    Array([1., 1., 3., 3., 3., 0.], dtype=float32)

    Args:
      lhs: [M, K], bfloat16, float16 or float32.
      rhs: [G, K, N], or [G, N, K] with transpose_rhs; lhs' dtype unless compute_dtype is given.
      group_offsets: [G + 1] int32, non-decreasing, from 0 to M. Other values give unspecified rows, but no access out
        of bounds.
      transpose_rhs: multiply by the transpose of each rhs[g], read in place.
      bias: [G, N], added to the rows of its group in float32.
      precision: of float32 products, as in `jax.lax.dot`. None follows `jax_default_matmul_precision`. On a GPU
        "highest" is IEEE float32, everything lower is TF32. bfloat16 and float16 are always accumulated in float32.
      compute_dtype: lhs and rhs are cast to it. A float32 rhs keeps a float32 gradient that is never rounded to it.
      out_dtype: of the result; lhs.dtype by default.
      backend: "auto" takes the kernels on a GPU (on Hopper with Python >= 3.12 the faster of Triton's and Pallas') and
        XLA on a CPU or TPU. "triton", "pallas" (interpreted on a CPU) or "xla" runs or raises.
      plan: a `Plan` instead of the tuned or heuristic one.

    Returns:
      [M, N] in out_dtype.

    Raises:
      ValueError: shapes that do not fit, an unknown backend.
      TypeError: dtypes that the kernels do not multiply, dtypes of lhs and rhs that differ without compute_dtype;
        forward-mode differentiation (JAX's own error).
      NotImplementedError: a precision algorithm that the kernels do not have.

    Residuals: "grouped_matmul.lhs" (its cast), "grouped_matmul.out" (checkpoint names).

    Source: the grouped GEMM of MegaBlocks (Gale et al. 2022, arXiv:2211.15841), over ragged rows instead of padded
    blocks.
    """
    transpose_rhs = check_flag("transpose_rhs", transpose_rhs)
    check_float("lhs", lhs, "[M, K]")
    check_float("rhs", rhs, "[G, N, K]" if transpose_rhs else "[G, K, N]")
    check_offsets(group_offsets)
    ((G, K, N),) = shapes_of((rhs,), transpose_rhs)
    transposed = " (transposed)" if transpose_rhs else ""
    check_size("K of lhs (its columns)", lhs.shape[1], f"K of rhs {tuple(rhs.shape)}{transposed}", K)
    check_groups(group_offsets, "rhs.shape[0]", G)
    if bias is not None:
        check_float("bias", bias, "[G, N]")
        if bias.shape != (G, N):
            raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be [G, N] = {(G, N)}.")
    compute = compute_dtype_of("lhs", lhs, "rhs", rhs, compute_dtype, "the gradient of rhs stays")
    precision, compute = resolve_precision(precision, compute)
    problem = Problem(G, lhs.shape[0], K, N, compute.name, transpose_rhs)
    chosen, lhs, rhs, bias, group_offsets = PLANNER.prepare(problem, backend, plan, lhs, rhs, bias, group_offsets)
    out = float_dtype("out_dtype", lhs.dtype if out_dtype is None else out_dtype)
    spec = Spec("grouped_matmul", (chosen,), precision, compute, out, lhs.dtype, rhs.dtype, transpose_rhs)
    return matmul(spec, lhs, (rhs,), bias, group_offsets)


def grouped_wgrad(
    lhs: jax.Array,
    dout: jax.Array,
    group_offsets: jax.Array,
    *,
    precision: lax.PrecisionLike = None,
    out_dtype=None,
    accumulate_into: jax.Array | None = None,
    backend: str = "auto",
    plan: Plan | None = None,
) -> jax.Array:
    """The weight gradient of `grouped_matmul`: `out[g] = lhs[rows of g].T @ dout[rows of g]`, summed in float32.

    Differentiable in lhs, dout and accumulate_into (reverse mode). Deterministic. An empty group's result is exactly
    zero.

    >>> import jax.numpy as jnp, jaxops
    >>> jaxops.grouped_wgrad(jnp.ones((5, 1)), jnp.ones((5, 1)), jnp.array([0, 2, 2, 5], jnp.int32)).ravel()
    Array([2., 0., 3.], dtype=float32)

    Args:
      lhs: [M, K], bfloat16, float16 or float32.
      dout: [M, N], lhs' dtype.
      group_offsets: [G + 1] int32, as in `grouped_matmul`.
      precision: as in `grouped_matmul`.
      out_dtype: of the result; accumulate_into.dtype, or lhs.dtype, by default.
      accumulate_into: [G, K, N] to which the result is added in float32. XLA may reuse its buffer (donate it under
        jit). An empty group's part stays unchanged, to the bit. Hopper adds in float32 with subnormal numbers as zeros.
      backend, plan: as in `grouped_matmul`; only plan.wgrad counts.

    Returns:
      [G, K, N] in out_dtype.

    Raises:
      ValueError, TypeError, NotImplementedError: as `grouped_matmul`; an out_dtype other than accumulate_into's.

    Residuals: "grouped_wgrad.out" (checkpoint name).
    """
    check_float("lhs", lhs, "[M, K]")
    check_float("dout", dout, "[M, N]")
    check_offsets(group_offsets)
    check_size("M of dout (its rows)", dout.shape[0], "M of lhs", lhs.shape[0])
    precision, compute = resolve_precision(precision, compute_dtype_of("lhs", lhs, "dout", dout, None))
    G, (M, K), N = group_offsets.shape[0] - 1, lhs.shape, dout.shape[1]
    if accumulate_into is not None:
        check_float("accumulate_into", accumulate_into, "[G, K, N]")
        if accumulate_into.shape != (G, K, N):
            shape = tuple(accumulate_into.shape)
            raise ValueError(f"accumulate_into has shape {shape}; it must be [G, K, N] = {(G, K, N)}.")
        if out_dtype is not None and float_dtype("out_dtype", out_dtype) != accumulate_into.dtype:
            raise TypeError(
                f"out_dtype is {jnp.dtype(out_dtype).name}, but accumulate_into is {accumulate_into.dtype}: leave "
                "out_dtype away."
            )
        out_dtype = accumulate_into.dtype
    chosen, lhs, dout, accumulate_into, group_offsets = PLANNER.prepare(
        Problem(G, M, K, N, compute.name), backend, plan, lhs, dout, accumulate_into, group_offsets
    )
    out = float_dtype("out_dtype", lhs.dtype if out_dtype is None else out_dtype)
    spec = Spec("grouped_matmul", (chosen,), precision, compute, out, lhs.dtype, dout.dtype)
    return wgrad(spec, ((G, K, N),), lhs, dout, accumulate_into, group_offsets)[0]
