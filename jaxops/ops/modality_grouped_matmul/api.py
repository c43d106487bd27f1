"""The public function: checks, then the custom_vjp that wires the three passes together."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap

from jaxops._lib.checks import check_flag, check_float, check_offsets, check_size, compute_dtype_of, float_dtype
from jaxops._lib.device import device_of
from jaxops._lib.differentiable import differentiable
from jaxops._lib.manual_axes import vary_together
from jaxops._lib.precision import named_cast, resolve_precision
from jaxops._lib.tuned import tuned_rows
from jaxops.ops.grouped_matmul.modalities import Shapes, launches, shapes_of
from jaxops.ops.modality_grouped_matmul.fwd_pallas import fwd_pallas
from jaxops.ops.modality_grouped_matmul.plan import Plan, Problem, make_plan
from jaxops.ops.modality_grouped_matmul.wgrad_pallas import wgrad_pallas
from jaxops.ops.modality_grouped_matmul.xla import fwd_xla, wgrad_xla

Arrays = tuple[jax.Array, ...]


def modality_grouped_matmul(
    lhs: jax.Array,
    rhs: Arrays,
    group_offsets: jax.Array,
    *,
    transpose_rhs: bool = False,
    precision: lax.PrecisionLike = None,
    compute_dtype=None,
    out_dtype=None,
    backend: str = "auto",
    plan: Plan | None = None,
) -> jax.Array:
    """`grouped_matmul` where rows come by modality, then by expert, and each modality has its own number of experts, of its own sizes.

    Groups are numbered through all modalities: rhs[0]'s, then rhs[1]'s and so on; group g is the rows `group_offsets[g]` to `group_offsets[g + 1] - 1`.
    A row of modality i is its first K_i columns times its group's matrix of rhs[i], in its first N_i columns; the others are exactly zero, so the result
    is the lhs of a next such call as it is. What stands in a row's columns past K_i (NaN too) reaches no output and no gradient, and its gradient there
    is zero; rows outside all groups likewise, and they come out zero. Nothing is multiplied with padding or read from it, and each row is written once.
    Groups may be empty and of any size; the offsets stay on the device and new values never recompile. Differentiable (reverse mode, any order) in lhs and
    every rhs[i]; an empty group's gradient is exactly zero. Deterministic.

    >>> import jax.numpy as jnp, jaxops
    >>> vision, text = jnp.ones((1, 4, 3)), jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])  # one expert 4 -> 3, two 2 -> 2
    >>> jaxops.modality_grouped_matmul(jnp.ones((5, 4)), (vision, text), jnp.array([0, 2, 3, 4], jnp.int32))
    Array([[4., 4., 4.],
           [4., 4., 4.],
           [1., 1., 0.],
           [2., 2., 0.],
           [0., 0., 0.]], dtype=float32)

    Args:
      lhs: [M, K], bfloat16, float16 or float32; K is the largest K_i.
      rhs: a tuple (or list) of one array a modality, [G_i, K_i, N_i], or [G_i, N_i, K_i] with transpose_rhs; all of one dtype, that of lhs
        unless compute_dtype is given.
      group_offsets: [G_0 + G_1 + ... + 1] int32, non-decreasing, within 0 to M. Other values give unspecified rows, but no access out of bounds.
      transpose_rhs: multiply by the transpose of each matrix, read in place.
      precision, compute_dtype, out_dtype: as in `grouped_matmul`.
      backend: "auto" takes triton on Hopper where it can, Pallas on other GPUs and plain XLA on CPU and TPU; "triton" (on Hopper, with Python >= 3.12, in
        bfloat16 and float16 where every K_i and N_i is a multiple of 8), "pallas" (interpreted on a CPU) or "xla" runs or raises.
      plan: a `jaxops.ops.modality_grouped_matmul.Plan`, instead of what grouped_matmul would take for each modality (tuned or heuristic).

    Returns:
      [M, N] in out_dtype; N is the largest N_i.

    Raises:
      ValueError: shapes that do not fit together, no modality, an unknown backend.
      TypeError: dtypes that the kernels do not multiply, dtypes of lhs and rhs that differ without compute_dtype, or within rhs, a rhs that is one
        array; forward-mode differentiation (JAX's own error).
      NotImplementedError: a precision algorithm that the kernels do not have.

    Residuals: named "modality_grouped_matmul.lhs", "modality_grouped_matmul.out" (checkpoint names; lhs: its cast).

    Source: the experts by modality of MoMa (Lin et al. 2024, arXiv:2407.21770), with the grouped GEMM of MegaBlocks (Gale et al. 2022, arXiv:2211.15841).
    """
    transpose_rhs = check_flag("transpose_rhs", transpose_rhs)
    needed = "[G, N, K]" if transpose_rhs else "[G, K, N]"
    check_float("lhs", lhs, "[M, K]")
    if not isinstance(rhs, (tuple, list)):
        raise TypeError(
            f"rhs is a {type(rhs).__name__}; pass a tuple of one array {needed} a modality, or call jaxops.grouped_matmul with one array."
        )
    if not rhs:
        raise ValueError(f"rhs is empty; pass a tuple of one array {needed} a modality.")
    for i, w in enumerate(rhs):
        check_float(f"rhs[{i}]", w, needed)
    check_offsets(group_offsets, count="all groups")
    shapes = shapes_of(tuple(rhs), transpose_rhs)
    check_size(
        "K of lhs (its columns)",
        lhs.shape[1],
        f"the largest K of rhs {[tuple(w.shape) for w in rhs]}",
        max(K for _, K, _ in shapes),
    )
    groups = sum(G for G, _, _ in shapes)
    check_size(
        "len(group_offsets)",
        group_offsets.shape[0],
        f"the number of groups of all {len(rhs)} modalities + 1",
        groups + 1,
    )
    for i, w in enumerate(rhs):
        if w.dtype != rhs[0].dtype:
            raise TypeError(
                f"rhs[0] is {rhs[0].dtype} and rhs[{i}] is {w.dtype}: cast one of them; the modalities' matrices have one dtype."
            )
    compute = compute_dtype_of("lhs", lhs, "rhs", rhs[0], compute_dtype, "the gradients of rhs stay")
    precision, compute = resolve_precision(precision, compute)
    device = device_of(lhs, tuple(rhs), group_offsets)
    problem = Problem(lhs.shape[0], shapes, compute.name, transpose_rhs)
    plan = make_plan(problem, device, tuned_rows("grouped_matmul", device), backend=backend, plan=plan)
    out = float_dtype("out_dtype", lhs.dtype if out_dtype is None else out_dtype)
    spec = _Spec(plan, precision, compute, out, lhs.dtype, rhs[0].dtype, transpose_rhs)
    lhs, group_offsets, *weights = vary_together(lhs, group_offsets, *rhs)
    return _matmul(spec, lhs, tuple(weights), group_offsets)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What is static in a call."""

    plan: Plan
    precision: lax.Precision
    compute_dtype: jnp.dtype
    out_dtype: jnp.dtype
    lhs_dtype: jnp.dtype
    rhs_dtype: jnp.dtype
    transpose_rhs: bool = False

    def inner(self, out_dtype, transpose_rhs: bool) -> "_Spec":
        """For a product inside a differentiation rule, whose operands are in the compute dtype already. One that reads rhs the other way is this call's
        dgrad, and its own dgrad this call's forward."""
        c, plan = jnp.dtype(self.compute_dtype), self.plan
        if transpose_rhs != self.transpose_rhs:
            plan = dataclasses.replace(plan, fwd=plan.dgrad, dgrad=plan.fwd)
        return _Spec(plan, self.precision, c, jnp.dtype(out_dtype), c, c, transpose_rhs)


def _multiply(spec: _Spec, lhs: jax.Array, rhs: Arrays, offsets: jax.Array) -> jax.Array:
    lhs, rhs = lhs.astype(spec.compute_dtype), tuple(w.astype(spec.compute_dtype) for w in rhs)
    out = jax.ShapeDtypeStruct(
        (lhs.shape[0], max(w.shape[1 if spec.transpose_rhs else 2] for w in rhs)), spec.out_dtype
    )
    if spec.plan.backend == "xla" or 0 in (*lhs.shape, *out.shape):
        return fwd_xla(lhs, rhs, offsets, out=out, transpose_rhs=spec.transpose_rhs, precision=spec.precision)
    assert spec.plan.fwd is not None  # make_plan fills it
    result = None
    for tiles, parts in launches(shapes_of(rhs), spec.plan.fwd):
        how = {"parts": parts, "out": out, "tiles": tiles, "transpose_rhs": spec.transpose_rhs}
        operands = lhs, tuple(rhs[part.number] for part in parts), offsets, result
        if tiles.kernel == "triton":
            from jaxops.ops.modality_grouped_matmul.gemm_triton import (
                fwd_triton,
            )  # jax-triton is imported only where it is called

            result = sequential_vmap(functools.partial(fwd_triton, **how, cores=spec.plan.on.cores))(
                *operands
            )  # a call through jax-triton has no batching rule
        else:
            result = fwd_pallas(*operands, precision=spec.precision, interpret=spec.plan.on.interpret, **how)
    return jnp.zeros(out.shape, out.dtype) if result is None else result


def _matmul_fwd(spec: _Spec, lhs, rhs, offsets):
    # As in grouped_matmul: the casts are kept for the backward, and the call goes through the custom_vjp, so that this rule can be differentiated once more.
    lhs = named_cast(lhs, spec.compute_dtype, "modality_grouped_matmul.lhs")
    rhs = tuple(w.astype(spec.compute_dtype) for w in rhs)
    out = checkpoint_name(
        _matmul(spec.inner(spec.out_dtype, spec.transpose_rhs), lhs, rhs, offsets), "modality_grouped_matmul.out"
    )
    return out, (lhs, rhs, offsets)


def _matmul_bwd(spec: _Spec, residuals, dout):
    lhs, rhs, offsets = residuals
    dout = dout.astype(spec.compute_dtype)
    dlhs = _matmul(spec.inner(spec.lhs_dtype, not spec.transpose_rhs), dout, rhs, offsets)
    left, right = (dout, lhs) if spec.transpose_rhs else (lhs, dout)
    return dlhs, _wgrad(spec, shapes_of(rhs), left, right, offsets), None


_matmul = differentiable(_multiply, _matmul_fwd, _matmul_bwd, static=1)


def _multiply_wgrad(spec: _Spec, shapes: Shapes, lhs: jax.Array, dout: jax.Array, offsets: jax.Array) -> Arrays:
    """Of each modality [G, K, N] as `shapes`, in spec.rhs_dtype: its groups' rows of lhs's first K columns times dout's first N ones."""
    if spec.plan.backend == "xla":
        return tuple(wgrad_xla(lhs, dout, offsets, shapes=shapes, precision=spec.precision, out_dtype=spec.rhs_dtype))
    assert spec.plan.wgrad is not None  # make_plan fills it
    found = [jnp.zeros(shape, spec.rhs_dtype) for shape in shapes]
    for tiles, parts in launches(shapes, spec.plan.wgrad) if lhs.shape[0] else ():
        how = {"parts": parts, "shapes": shapes, "tiles": tiles, "out_dtype": spec.rhs_dtype}
        if tiles.kernel == "triton":
            from jaxops.ops.modality_grouped_matmul.gemm_triton import wgrad_triton

            results = sequential_vmap(functools.partial(wgrad_triton, **how, cores=spec.plan.on.cores))(
                lhs, dout, offsets
            )
        else:
            results = wgrad_pallas(
                lhs, dout, offsets, precision=spec.precision, interpret=spec.plan.on.interpret, **how
            )
        for part, result in zip(parts, results, strict=True):
            found[part.number] = result
    return tuple(found)


def _wgrad_fwd(spec: _Spec, shapes: Shapes, lhs, dout, offsets):
    return _wgrad(spec, shapes, lhs, dout, offsets), (lhs, dout, offsets)


def _wgrad_bwd(spec: _Spec, shapes: Shapes, residuals, cts):
    lhs, dout, offsets = residuals
    weights = tuple(ct.astype(spec.compute_dtype) for ct in cts)
    # `shapes` are rhs's own: a wgrad of a transposed call has the two widths the other way round, and so have these products.
    dlhs = _matmul(spec.inner(spec.compute_dtype, True), dout, weights, offsets)
    ddout = _matmul(spec.inner(spec.compute_dtype, False), lhs, weights, offsets)
    return dlhs, ddout, None


_wgrad = differentiable(_multiply_wgrad, _wgrad_fwd, _wgrad_bwd, static=2)
