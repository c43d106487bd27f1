"""`jax.lax.ragged_dot`, run as `grouped_matmul`."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.checks import FLOATS, check_array, check_dtype, check_size
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.precision import kernels_have
from jaxops._lib.planning.device import device_of
from jaxops.ops.grouped_matmul.api import grouped_matmul
from jaxops.ops.grouped_matmul.plan import Plan, Problem, make_plan
from jaxops.ops.grouped_matmul.product import Spec, matmul


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
    """`jax.lax.ragged_dot` with the kernels of `grouped_matmul`: a drop-in replacement.

    Mixed dtypes are promoted as JAX does. Differentiable in lhs and rhs (reverse mode).

    >>> import jax.numpy as jnp, jaxops
    >>> jaxops.ragged_dot(jnp.ones((3, 2)), jnp.ones((2, 2, 1)), jnp.array([1, 1])).ravel()
    Array([2., 2., 0.], dtype=float32)

    Args:
      lhs: [M, K], any numeric dtype. Integers, float64 and other dtypes that no kernel multiplies use the xla backend.
        So does a symbolic M (`jax.export`).
      rhs: [G, K, N].
      group_sizes: [G] integers; [H] with H >= G if group_offset is given. Rows past their sum are zeros.
      precision: as in `jax.lax.dot`. Algorithms that `grouped_matmul` does not have use the xla backend.
      preferred_element_type: dtype of the result; that of `jax.lax.dot(lhs, rhs)` by default.
      group_offset: [1] integer, the index in group_sizes of rhs[0]'s group, for a shard that holds G of all groups.
        Rows of other groups are zeros. (JAX has the argument, but raises on it.)
      out_sharding: must be None.
      backend, plan: as in `grouped_matmul`.

    Returns:
      [M, N].

    Raises:
      ValueError, TypeError: as `grouped_matmul`.
      NotImplementedError: out_sharding; backend "triton" or "pallas" for dtypes or algorithms of the xla backend only.
    """
    if out_sharding is not None:
        raise NotImplementedError(
            "out_sharding is not supported: constrain the result with jax.lax.with_sharding_constraint, or call "
            "ragged_dot inside jax.shard_map."
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
            f"group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}; it must be a vector of integers, "
            "the rows of each group."
        )
    (G, k, _), H = rhs.shape, group_sizes.shape[0]
    check_size("K of lhs (its columns)", lhs.shape[1], f"K of rhs {tuple(rhs.shape)}", k)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(group_sizes, dtype=jnp.int32)])
    if group_offset is None:
        check_size("len(group_sizes)", H, "rhs.shape[0]", G)
    else:
        if group_offset.shape != (1,) or not jnp.issubdtype(group_offset.dtype, jnp.integer):
            raise ValueError(
                f"group_offset is {group_offset.dtype}{list(group_offset.shape)}; it must be one integer: shape (1,)."
            )
        # A clamped gather, not a dynamic slice: a shard that starts past H - G has empty groups at its end.
        offsets = offsets[jnp.clip(group_offset.astype(jnp.int32) + jnp.arange(G + 1, dtype=jnp.int32), 0, H)]
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    if preferred_element_type is None:  # bfloat16 with float16 is multiplied in float32 and gives bfloat16, as in JAX
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
    """For dtypes and algorithms that no kernel has: the xla backend, as JAX but without a copy of lhs for each
    group."""
    problem = Problem(rhs.shape[0], lhs.shape[0], lhs.shape[1], rhs.shape[2], lhs.dtype.name)
    backend = "xla" if backend == "auto" and plan is None else backend
    plan = make_plan(problem, device_of(lhs, rhs, offsets), backend=backend, plan=plan)
    if plan.backend != "xla":
        raise NotImplementedError(
            f"the {plan.backend} backend multiplies {', '.join(FLOATS)}; this is {lhs.dtype.name} into {out.name} with "
            f"precision={precision!r}. Use backend='auto' or 'xla'."
        )
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        precision = None  # only floating-point products have one
    elif precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    spec = Spec("grouped_matmul", (plan,), precision, lhs.dtype, out, lhs.dtype, lhs.dtype)
    lhs, rhs, offsets = vary_together(lhs, rhs, offsets)
    return matmul(spec, lhs, (rhs,), None, offsets)
