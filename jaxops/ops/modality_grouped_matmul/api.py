"""The public function: checks and plans. Its passes and gradients are grouped_matmul's."""

from collections.abc import Callable, Sequence

import jax
from jax import lax

from jaxops._lib.arrays.checks import (
    check_flag,
    check_float,
    check_groups,
    check_offsets,
    check_size,
    compute_dtype_of,
    float_dtype,
    type_name,
)
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.precision import resolve_precision
from jaxops._lib.planning.device import device_of
from jaxops._lib.planning.tuned import tuned_rows
from jaxops.ops.grouped_matmul import Plan, Problem, Spec, matmul, shapes_of
from jaxops.ops.modality_grouped_matmul.plan import make_plans


def _kernels() -> dict[str, Callable]:
    from jaxops.ops.modality_grouped_matmul import gemm_triton  # jax-triton is imported where it is called

    return {"fwd": gemm_triton.fwd_triton, "wgrad": gemm_triton.wgrad_triton}


def modality_grouped_matmul(
    lhs: jax.Array,
    rhs: tuple[jax.Array, ...],
    group_offsets: jax.Array,
    *,
    transpose_rhs: bool = False,
    precision: lax.PrecisionLike = None,
    compute_dtype=None,
    out_dtype=None,
    backend: str = "auto",
    plan: Plan | Sequence[Plan] | None = None,
) -> jax.Array:
    """`grouped_matmul` of rows sorted by modality, then by expert, where each modality has experts of its own number
    and sizes.

    Groups are numbered through all modalities: first rhs[0]'s, then rhs[1]'s, and so on. A row of modality i is its
    first K_i columns times its group's matrix, in the result's first N_i columns; the other columns are exactly zero,
    so the result can be the lhs of the next call. Columns past K_i (NaN included) affect no output and no gradient, and
    their gradient is zero; so do rows outside all groups, which are written as zeros. No padding is multiplied or read.
    Gradients, empty groups, offsets, determinism: as `grouped_matmul`.

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
      rhs: a tuple (or list) of one array a modality, [G_i, K_i, N_i], or [G_i, N_i, K_i] with transpose_rhs; all of one
        dtype, lhs' unless compute_dtype is given.
      group_offsets: [G_0 + G_1 + ... + 1] int32, as in `grouped_matmul`.
      transpose_rhs, precision, compute_dtype, out_dtype: as in `grouped_matmul`.
      backend: as in `grouped_matmul`; "triton" needs every K_i and N_i to be a multiple of 8.
      plan: a `Plan` of grouped_matmul for all modalities, or a sequence of one for each.

    Returns:
      [M, N] in out_dtype; N is the largest N_i.

    Raises:
      ValueError, TypeError, NotImplementedError: as `grouped_matmul`; a rhs that is one array, empty, or of several
        dtypes.

    Residuals: "modality_grouped_matmul.lhs" (its cast), "modality_grouped_matmul.out" (checkpoint names).

    Source: the experts by modality of MoMa (Lin et al. 2024, arXiv:2407.21770).
    """
    transpose_rhs = check_flag("transpose_rhs", transpose_rhs)
    needed = "[G, N, K]" if transpose_rhs else "[G, K, N]"
    check_float("lhs", lhs, "[M, K]")
    if not isinstance(rhs, (tuple, list)):
        raise TypeError(
            f"rhs is {type_name(rhs)}; pass a tuple of one array {needed} a modality, or call "
            "jaxops.grouped_matmul with one array."
        )
    if not rhs:
        raise ValueError(f"rhs is empty; pass a tuple of one array {needed} a modality.")
    for i, w in enumerate(rhs):
        check_float(f"rhs[{i}]", w, needed)
    check_offsets(group_offsets, count="all groups")
    shapes = shapes_of(tuple(rhs), transpose_rhs)
    largest = f"the largest K of rhs {[tuple(w.shape) for w in rhs]}"
    check_size("K of lhs (its columns)", lhs.shape[1], largest, max(K for _, K, _ in shapes))
    check_groups(group_offsets, "the sum of all rhs[i].shape[0]", sum(G for G, _, _ in shapes))
    for i, w in enumerate(rhs):
        if w.dtype != rhs[0].dtype:
            raise TypeError(
                f"rhs[0] is {rhs[0].dtype} and rhs[{i}] is {w.dtype}: cast one of them; all modalities' weights have "
                "one dtype."
            )
    compute = compute_dtype_of("lhs", lhs, "rhs", rhs[0], compute_dtype, "the gradients of rhs stay")
    precision, compute = resolve_precision(precision, compute)
    device = device_of(lhs, tuple(rhs), group_offsets)
    M = -(-lhs.shape[0] // len(rhs))
    problems = [Problem(G, M, K, N, compute.name, transpose_rhs) for G, K, N in shapes]
    plans = make_plans(problems, device, tuned_rows("grouped_matmul", device), backend=backend, plan=plan)
    out = float_dtype("out_dtype", lhs.dtype if out_dtype is None else out_dtype)
    spec = Spec(
        "modality_grouped_matmul", plans, precision, compute, out, lhs.dtype, rhs[0].dtype, transpose_rhs, _kernels
    )  # fmt: skip
    lhs, group_offsets, *weights = vary_together(lhs, group_offsets, *rhs)
    return matmul(spec, lhs, tuple(weights), None, group_offsets)
