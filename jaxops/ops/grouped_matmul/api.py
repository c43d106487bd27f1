"""The public functions: checks, then the custom_vjp that wires the three passes together."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap

from jaxops._lib.checks import (
    FLOATS,
    check_array,
    check_dtype,
    check_flag,
    check_float,
    check_offsets,
    check_size,
    compute_dtype_of,
    float_dtype,
)
from jaxops._lib.device import Device, device_of
from jaxops._lib.differentiable import differentiable
from jaxops._lib.manual_axes import vary_together
from jaxops._lib.precision import kernels_have, named_cast, resolve_precision
from jaxops._lib.tuned import tuned_rows
from jaxops.ops.grouped_matmul.fwd_pallas import fwd_pallas
from jaxops.ops.grouped_matmul.plan import Plan, Problem, make_plan
from jaxops.ops.grouped_matmul.wgrad_pallas import wgrad_pallas
from jaxops.ops.grouped_matmul.xla import fwd_xla, wgrad_xla


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

    Group g is the rows `group_offsets[g]` to `group_offsets[g + 1] - 1`. Groups may be empty and of any size; the offsets stay on the device and new
    values never recompile. Rows before the first group and after the last one come out zero, and what they hold reaches no output and no
    gradient. Differentiable (reverse mode, any order) in lhs, rhs and bias; an empty group's gradients are exactly zero. Deterministic.

    >>> import jax, jax.numpy as jnp, jaxops
    >>> tokens, experts = jnp.ones((6, 4)), jnp.stack([jnp.eye(4), 2 * jnp.eye(4), 3 * jnp.eye(4)])
    >>> jaxops.grouped_matmul(tokens, experts, jnp.array([0, 2, 2, 5], jnp.int32))[:, 0]  # expert 1 has no rows, row 5 no expert
    Array([1., 1., 3., 3., 3., 0.], dtype=float32)

    Args:
      lhs: [M, K], bfloat16, float16 or float32.
      rhs: [G, K, N], or [G, N, K] with transpose_rhs; dtype of lhs unless compute_dtype is given.
      group_offsets: [G + 1] int32, non-decreasing, within 0 to M. Other values give unspecified rows, but no access out of bounds.
      transpose_rhs: multiply by the transpose of each rhs[g], read in place.
      bias: [G, N], added to the rows of its group in float32.
      precision: of float32 products, as in `jax.lax.dot`: None follows `jax_default_matmul_precision`; on a GPU "highest" is IEEE float32 and
        everything lower TF32. bfloat16 and float16 are always accumulated in float32.
      compute_dtype: dtype to which lhs and rhs are cast inside. A float32 rhs keeps a float32 gradient, which is never rounded to compute_dtype.
      out_dtype: dtype of the result; lhs.dtype by default.
      backend: "auto" takes the kernels on a GPU (on Hopper, Triton's where they are the faster ones, with Python >= 3.12) and plain XLA on CPU and TPU;
        "triton", "pallas" (interpreted on a CPU) or "xla" runs or raises.
      plan: a `Plan`, instead of the tuned or heuristic one.

    Returns:
      [M, N] in out_dtype.

    Raises:
      ValueError: shapes that do not fit together, an unknown backend.
      TypeError: dtypes that the kernels do not multiply, dtypes of lhs and rhs that differ without compute_dtype; forward-mode
        differentiation (JAX's own error).
      NotImplementedError: a precision algorithm that the kernels do not have.

    Residuals: named "grouped_matmul.lhs", "grouped_matmul.out" (checkpoint names; lhs: its cast).

    Source: the grouped GEMM of MegaBlocks (Gale et al. 2022, arXiv:2211.15841) over ragged rows instead of padded blocks.
    """
    transpose_rhs = check_flag("transpose_rhs", transpose_rhs)
    check_float("lhs", lhs, "[M, K]")
    check_float("rhs", rhs, "[G, N, K]" if transpose_rhs else "[G, K, N]")
    check_offsets(group_offsets)
    G, k, n = (rhs.shape[0], rhs.shape[2], rhs.shape[1]) if transpose_rhs else rhs.shape
    check_size(
        "K of lhs (its columns)",
        lhs.shape[1],
        f"K of rhs {tuple(rhs.shape)}{' (transposed)' if transpose_rhs else ''}",
        k,
    )
    check_size("len(group_offsets)", group_offsets.shape[0], "rhs.shape[0] + 1 (G groups have G + 1 offsets)", G + 1)
    if bias is not None:
        check_float("bias", bias, "[G, N]")
        if bias.shape != (G, n):
            raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be [G, N] = {(G, n)}.")
    compute = compute_dtype_of("lhs", lhs, "rhs", rhs, compute_dtype, "the gradient of rhs stays")
    precision, compute = resolve_precision(precision, compute)
    plan = _plan(
        Problem(G, lhs.shape[0], k, n, compute.name, transpose_rhs), device_of(lhs, rhs, group_offsets), backend, plan
    )
    out = float_dtype("out_dtype", lhs.dtype if out_dtype is None else out_dtype)
    spec = _Spec(plan, precision, compute, out, lhs.dtype, rhs.dtype, transpose_rhs)
    return _matmul(spec, *vary_together(lhs, rhs, bias, group_offsets))


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

    Differentiable in lhs, dout and accumulate_into (reverse mode). Deterministic. An empty group's result is exactly zero.

    >>> import jax.numpy as jnp, jaxops
    >>> jaxops.grouped_wgrad(jnp.ones((5, 1)), jnp.ones((5, 1)), jnp.array([0, 2, 2, 5], jnp.int32)).ravel()
    Array([2., 0., 3.], dtype=float32)

    Args:
      lhs: [M, K], bfloat16, float16 or float32.
      dout: [M, N], dtype of lhs.
      group_offsets: [G + 1] int32, as in `grouped_matmul`.
      precision: as in `grouped_matmul`.
      out_dtype: dtype of the result; accumulate_into.dtype, or lhs.dtype, by default.
      accumulate_into: [G, K, N] to which the result is added in float32. Its buffer is reused where XLA may (donate it under jit); an empty
        group leaves its part unchanged, to the bit.
      backend, plan: as in `grouped_matmul`; only plan.wgrad counts.

    Returns:
      [G, K, N] in out_dtype.

    Raises:
      ValueError, TypeError, NotImplementedError: as `grouped_matmul`; also an out_dtype that is not accumulate_into's.

    Residuals: named "grouped_wgrad.out" (checkpoint names).
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
            raise ValueError(
                f"accumulate_into has shape {tuple(accumulate_into.shape)}; it must be [G, K, N] = {(G, K, N)}."
            )
        if out_dtype is not None and float_dtype("out_dtype", out_dtype) != accumulate_into.dtype:
            raise TypeError(
                f"out_dtype is {jnp.dtype(out_dtype).name}, but accumulate_into is {accumulate_into.dtype}: leave out_dtype away."
            )
        out_dtype = accumulate_into.dtype
    plan = _plan(Problem(G, M, K, N, compute.name), device_of(lhs, dout, group_offsets), backend, plan)
    out = float_dtype("out_dtype", lhs.dtype if out_dtype is None else out_dtype)
    spec = _Spec(plan, precision, compute, out, lhs.dtype, dout.dtype)
    return _wgrad(spec, *vary_together(lhs, dout, accumulate_into, group_offsets))


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: lax.PrecisionLike = None,
    preferred_element_type=None,
    group_offset: jax.Array | None = None,
    out_sharding=None,
    *,
    backend: str = "auto",
    plan: Plan | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot`, run as `grouped_matmul`: change the module's name in the call and nothing else.

    Mixed dtypes are promoted as JAX does. Differentiable in lhs and rhs (reverse mode).

    >>> import jax.numpy as jnp, jaxops
    >>> jaxops.ragged_dot(jnp.ones((3, 2)), jnp.ones((2, 2, 1)), jnp.array([1, 1])).ravel()
    Array([2., 2., 0.], dtype=float32)

    Args:
      lhs: [M, K], any number's dtype. Integers, float64 and the like are multiplied by the xla backend. M may be symbolic (`jax.export`): the xla backend.
      rhs: [G, K, N].
      group_sizes: [G] integers; [H] with H >= G where group_offset is given. Rows past their sum come out zero.
      precision: as in `jax.lax.dot`, every algorithm; those that `grouped_matmul` has not, by the xla backend.
      preferred_element_type: dtype of the result; that of `jax.lax.dot(lhs, rhs)` by default.
      group_offset: [1] integer: the group in group_sizes where rhs[0] starts, for a shard that holds G of all groups. Rows of other groups come out
        zero. (JAX has the argument, but raises on it.)
      out_sharding: must be None.
      backend, plan: as in `grouped_matmul`.

    Returns:
      [M, N].

    Raises:
      ValueError, TypeError: as `grouped_matmul`.
      NotImplementedError: out_sharding; backend "triton" or "pallas" for what only the xla backend multiplies.
    """
    if out_sharding is not None:
        raise NotImplementedError(
            "out_sharding is not supported: constrain the result with jax.lax.with_sharding_constraint, or call ragged_dot inside jax.shard_map."
        )
    for name, x, shape in (("lhs", lhs, "[M, K]"), ("rhs", rhs, "[G, K, N]")):
        check_array(name, x, f"a JAX array {shape}")
        if len(x.shape) != shape.count(",") + 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}.")
    for name, x in (("group_sizes", group_sizes), ("group_offset", group_offset)):
        if x is not None:
            check_array(name, x, "an array of integers")
    if len(group_sizes.shape) != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(
            f"group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}; it must be a vector of integers, the rows of each group."
        )
    (G, k, _), H = rhs.shape, group_sizes.shape[0]
    check_size("K of lhs (its columns)", lhs.shape[1], f"K of rhs {tuple(rhs.shape)}", k)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(group_sizes, dtype=jnp.int32)])
    if group_offset is None:
        check_size("len(group_sizes)", H, "rhs.shape[0]", G)
    else:
        if group_offset.shape != (1,) or not jnp.issubdtype(group_offset.dtype, jnp.integer):
            raise ValueError(
                f"group_offset is {group_offset.dtype}{list(group_offset.shape)}; it must be one integer in an array of shape (1,)."
            )
        # A clamped gather, not a dynamic slice: a shard that starts past H - G has empty groups at its end, not the groups before it.
        offsets = offsets[jnp.clip(group_offset.astype(jnp.int32) + jnp.arange(G + 1, dtype=jnp.int32), 0, H)]
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    if preferred_element_type is None:  # bfloat16 with float16 multiplies in float32 and gives bfloat16, as in JAX
        one = [jax.ShapeDtypeStruct((1, 1), x.dtype) for x in (lhs, rhs)]
        preferred_element_type = jax.eval_shape(lax.dot, *one).dtype
    out = check_dtype("preferred_element_type", preferred_element_type)
    lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    if dtype.name in FLOATS and out.name in FLOATS and kernels_have(precision, dtype):
        return grouped_matmul(lhs, rhs, offsets, precision=precision, out_dtype=out, backend=backend, plan=plan)
    return _portable_ragged_dot(lhs, rhs, offsets, precision, out, backend, plan)


def _portable_ragged_dot(
    lhs, rhs, offsets, precision: lax.PrecisionLike, out: jnp.dtype, backend: str, plan: Plan | None
) -> jax.Array:
    """What no kernel multiplies (integers, float64, other algorithms than the kernels'), by the xla backend: as JAX does, without a copy of lhs a group."""
    problem = Problem(rhs.shape[0], lhs.shape[0], lhs.shape[1], rhs.shape[2], lhs.dtype.name)
    plan = make_plan(
        problem,
        device_of(lhs, rhs, offsets),
        backend="xla" if backend == "auto" and plan is None else backend,
        plan=plan,
    )
    if plan.backend != "xla":
        raise NotImplementedError(
            f"the {plan.backend} backend multiplies {', '.join(FLOATS)}; this is {lhs.dtype.name} into {out.name} with precision={precision!r}. "
            "Use backend='auto' or 'xla'."
        )
    if precision is None and jnp.issubdtype(lhs.dtype, jnp.floating):
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        precision = None  # of floating-point products
    spec = _Spec(plan, precision, lhs.dtype, out, lhs.dtype, lhs.dtype)
    return _matmul(spec, *vary_together(lhs, rhs, None, offsets))


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What is static in a call. `second` is rhs of grouped_matmul and dout of grouped_wgrad."""

    plan: Plan
    precision: lax.PrecisionLike
    compute_dtype: jnp.dtype
    out_dtype: jnp.dtype
    lhs_dtype: jnp.dtype
    second_dtype: jnp.dtype
    transpose_rhs: bool = False

    def inner(self, plan: Plan, out_dtype, transpose_rhs: bool = False) -> "_Spec":
        """For a call inside a differentiation rule, whose operands are in the compute dtype already."""
        c = self.compute_dtype
        return dataclasses.replace(
            self, plan=plan, out_dtype=jnp.dtype(out_dtype), lhs_dtype=c, second_dtype=c, transpose_rhs=transpose_rhs
        )

    def back(self) -> Plan:
        """The plan of the product that dgrad is: its own forward is this call's dgrad."""
        return dataclasses.replace(self.plan, fwd=self.plan.dgrad, dgrad=self.plan.fwd)


def _plan(problem: Problem, device: Device, backend: str, plan: Plan | None) -> Plan:
    if not isinstance(problem.M, int):  # a symbolic size of jax.export: kernels have a static grid
        backend = "xla" if backend == "auto" and plan is None else backend
        if "xla" not in (backend, plan.backend if plan is not None else None):
            raise NotImplementedError(
                f"M={problem.M} is symbolic; kernels need sizes that are known. Export with backend='xla', or once for each length."
            )
    return make_plan(problem, device, tuned_rows("grouped_matmul", device), backend=backend, plan=plan)


def _multiply(spec: _Spec, lhs, rhs, bias, offsets):
    lhs, rhs = lhs.astype(spec.compute_dtype), rhs.astype(spec.compute_dtype)
    (M, K), G, N = lhs.shape, rhs.shape[0], rhs.shape[1 if spec.transpose_rhs else 2]
    a, b = lhs, rhs
    if K == 0:  # a sum of nothing, but the bias still counts: one column of zeros says the same
        a, b, _ = vary_together(
            jnp.zeros((M, 1), a.dtype), jnp.zeros((G, N, 1) if spec.transpose_rhs else (G, 1, N), b.dtype), offsets
        )
    if 0 in (M, G, N):
        return vary_together(jnp.zeros((M, N), spec.out_dtype), offsets)[0]
    if spec.plan.backend == "xla":
        return fwd_xla(
            a, b, bias, offsets, transpose_rhs=spec.transpose_rhs, precision=spec.precision, out_dtype=spec.out_dtype
        )
    assert spec.plan.fwd is not None  # make_plan fills it
    how = {"transpose_rhs": spec.transpose_rhs, "tiles": spec.plan.fwd, "out_dtype": spec.out_dtype}
    if spec.plan.fwd.kernel == "triton":
        from jaxops.ops.grouped_matmul.gemm_triton import fwd_triton  # jax-triton is imported only where it is called

        return sequential_vmap(functools.partial(fwd_triton, **how, cores=spec.plan.on.cores))(
            a, b, bias, offsets
        )  # a call through jax-triton has no batching rule
    return fwd_pallas(a, b, bias, offsets, precision=spec.precision, interpret=spec.plan.on.interpret, **how)


def _matmul_fwd(spec: _Spec, lhs, rhs, bias, offsets):
    # The casts are kept for the backward: as many bytes as a second cast would read again. The call goes through the custom_vjp itself, so that
    # this rule can be differentiated once more.
    lhs = named_cast(lhs, spec.compute_dtype, "grouped_matmul.lhs")
    rhs = rhs.astype(spec.compute_dtype)
    out = checkpoint_name(
        _matmul(spec.inner(spec.plan, spec.out_dtype, spec.transpose_rhs), lhs, rhs, bias, offsets),
        "grouped_matmul.out",
    )
    return out, (lhs, rhs, bias, offsets)


def _matmul_bwd(spec: _Spec, residuals, dout):
    lhs, rhs, bias, offsets = residuals
    dout = dout.astype(spec.compute_dtype)
    plan, transposed = spec.plan, spec.transpose_rhs
    dlhs = _matmul(spec.inner(spec.back(), spec.lhs_dtype, not transposed), dout, rhs, None, offsets)
    drhs = _wgrad(spec.inner(plan, spec.second_dtype), *((dout, lhs) if transposed else (lhs, dout)), None, offsets)
    dbias = None
    if bias is not None:
        # Sums over the rows of each group, as the weight gradient of a column of ones: the same order of summing every time, no atomics.
        ones, _ = vary_together(jnp.ones((dout.shape[0], 1), spec.compute_dtype), dout)
        if plan.wgrad is not None:
            narrow = {
                "kernel": "pallas",
                "turns": False,
                "bm": 16,
                "bn": min(plan.wgrad.bn, 128),
                "warps": 4,
                "tail": 0,
            }
            plan = dataclasses.replace(plan, wgrad=dataclasses.replace(plan.wgrad, **narrow))
        sums = dataclasses.replace(spec.inner(plan, bias.dtype), precision=lax.Precision.HIGHEST)
        dbias = jnp.squeeze(_wgrad(sums, ones, dout, None, offsets), axis=1)
    return dlhs, drhs, dbias, None


_matmul = differentiable(_multiply, _matmul_fwd, _matmul_bwd, static=1)


def _multiply_wgrad(spec: _Spec, lhs, dout, accumulator, offsets):
    shape = (offsets.shape[0] - 1, lhs.shape[1], dout.shape[1])
    if 0 in (*shape, lhs.shape[0]):
        return vary_together(jnp.zeros(shape, spec.out_dtype), offsets)[0] if accumulator is None else accumulator
    if spec.plan.backend == "xla":
        return wgrad_xla(lhs, dout, accumulator, offsets, precision=spec.precision, out_dtype=spec.out_dtype)
    assert spec.plan.wgrad is not None  # make_plan fills it
    how = {"tiles": spec.plan.wgrad, "out_dtype": spec.out_dtype}
    if spec.plan.wgrad.kernel == "triton":
        from jaxops.ops.grouped_matmul.gemm_triton import wgrad_triton

        return sequential_vmap(functools.partial(wgrad_triton, **how, cores=spec.plan.on.cores))(
            lhs, dout, accumulator, offsets
        )
    return wgrad_pallas(
        lhs, dout, accumulator, offsets, precision=spec.precision, interpret=spec.plan.on.interpret, **how
    )


def _wgrad_fwd(spec: _Spec, lhs, dout, accumulator, offsets):
    was_there = None if accumulator is None else ()  # all that the backward needs to know of it
    return checkpoint_name(_wgrad(spec, lhs, dout, accumulator, offsets), "grouped_wgrad.out"), (
        lhs,
        dout,
        was_there,
        offsets,
    )


def _wgrad_bwd(spec: _Spec, residuals, ct):
    lhs, dout, accumulated, offsets = residuals
    weights = ct.astype(spec.compute_dtype)
    dlhs = _matmul(spec.inner(spec.back(), spec.lhs_dtype, True), dout, weights, None, offsets)
    ddout = _matmul(spec.inner(spec.plan, spec.second_dtype), lhs, weights, None, offsets)
    return dlhs, ddout, None if accumulated is None else ct, None


_wgrad = differentiable(_multiply_wgrad, _wgrad_fwd, _wgrad_bwd, static=1)


def grouped_matmul_sum(
    lhs: tuple[jax.Array, ...],
    rhs: tuple[jax.Array, ...],
    group_offsets: jax.Array,
    *,
    plan: Plan,
    transpose_rhs: bool = False,
    precision=None,
    out_dtype=None,
) -> jax.Array:
    """`sum_i grouped_matmul(lhs[i], rhs[i], group_offsets)` of one pair or two of equal shapes and dtype, added in float32 and rounded once. For ops that
    build on this one: nothing is checked, and plan.fwd is filled, as `make_plan` leaves it. On Hopper two pairs are one kernel."""
    out = jnp.dtype(lhs[0].dtype if out_dtype is None else out_dtype)
    if (
        len(lhs) > 1
        and plan.fwd is not None
        and plan.fwd.kernel == "triton"
        and 0 not in (*lhs[0].shape, *rhs[0].shape)
    ):
        precision, c = resolve_precision(precision, lhs[0].dtype)
        *operands, group_offsets = vary_together(*lhs, *rhs, group_offsets)
        result: Any = _sum_of_two(
            _Spec(plan, precision, c, out, c, c, transpose_rhs), operands[:2], operands[2:], group_offsets
        )
        return result
    wide = out if len(lhs) == 1 else jnp.float32
    how: dict[str, Any] = {"transpose_rhs": transpose_rhs, "precision": precision, "out_dtype": wide, "plan": plan}
    return functools.reduce(
        jnp.add, [grouped_matmul(a, b, group_offsets, **how) for a, b in zip(lhs, rhs, strict=True)]
    ).astype(out)


def _sum_of_two_forward(spec: _Spec, lhs, rhs, offsets):
    from jaxops.ops.grouped_matmul.gemm_triton import fwd_triton

    assert spec.plan.fwd is not None
    both = functools.partial(
        fwd_triton,
        transpose_rhs=spec.transpose_rhs,
        tiles=spec.plan.fwd,
        out_dtype=spec.out_dtype,
        cores=spec.plan.on.cores,
    )
    return sequential_vmap(lambda lhs, rhs, offsets: both(lhs[0], rhs[0], None, offsets, (lhs[1], rhs[1])))(
        lhs, rhs, offsets
    )


def _sum_of_two_fwd(spec: _Spec, lhs, rhs, offsets):
    return _sum_of_two(spec, lhs, rhs, offsets), (lhs, rhs, offsets)


def _sum_of_two_bwd(spec: _Spec, residuals, dout):
    lhs, rhs, offsets = residuals
    pairs = [_matmul_bwd(spec, (a, b, None, offsets), dout) for a, b in zip(lhs, rhs, strict=True)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs], None


_sum_of_two = differentiable(_sum_of_two_forward, _sum_of_two_fwd, _sum_of_two_bwd, static=1)
