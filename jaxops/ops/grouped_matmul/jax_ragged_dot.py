"""`jax.lax.ragged_dot`, run as `grouped_matmul`; what it has in common with `ragged_dot_general`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._lib.arrays.checks import FLOATS, check_array, check_dtype, check_integer, check_out_sharding, check_size
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.precision import kernels_have
from jaxops._lib.planning.device import device_of
from jaxops.ops.grouped_matmul.api import grouped_matmul, grouped_wgrad
from jaxops.ops.grouped_matmul.modalities import shapes_of
from jaxops.ops.grouped_matmul.plan import Plan, Problem, make_plan
from jaxops.ops.grouped_matmul.product import Spec, matmul, wgrad


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: lax.PrecisionLike = None,
    preferred_element_type=None,
    group_offset: jax.Array | int | None = None,
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
      group_offset: an integer, a scalar or [1], the index in group_sizes of rhs[0]'s group, for a shard that holds G of
        all groups. Rows of other groups are zeros. (JAX has the argument, but raises on it.)
      out_sharding: None, or one that splits no axis over several devices.
      backend, plan: as in `grouped_matmul`.

    Returns:
      [M, N].

    Raises:
      ValueError, TypeError: as `grouped_matmul`.
      NotImplementedError: an out_sharding that splits an axis; backend "triton" or "pallas" for dtypes or algorithms of
        the xla backend only.
    """
    check_out_sharding(out_sharding)
    for name, x, shape in (("lhs", lhs, "[M, K]"), ("rhs", rhs, "[G, K, N]")):
        check_array(name, x, f"a JAX array {shape}")
        if len(x.shape) != shape.count(",") + 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}.")
    check_array("group_sizes", group_sizes, "an array of integers")
    if len(group_sizes.shape) != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(
            f"group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}; it must be a vector of integers, "
            "the rows of each group."
        )
    G, k, _ = rhs.shape
    check_size("K of lhs (its columns)", lhs.shape[1], f"K of rhs {tuple(rhs.shape)}", k)
    offsets = offsets_of(group_sizes, group_offset, G)
    return Product(precision, preferred_element_type, backend, plan).rows(lhs, rhs, offsets)


def offsets_of(group_sizes: jax.Array, group_offset, G: int, axis: int = 0) -> jax.Array:
    """[..., G + 1] int32, of sizes [..., H]: those of the G groups of rhs, the first of which is group_offset.

    axis: of rhs, which has the groups.
    """
    H = group_sizes.shape[-1]
    ends = jnp.cumsum(group_sizes, axis=-1, dtype=jnp.int32)
    offsets = jnp.concatenate([jnp.zeros((*group_sizes.shape[:-1], 1), jnp.int32), ends], axis=-1)
    if group_offset is None:
        check_size("len(group_sizes)", H, f"rhs.shape[{axis}]", G)
        return offsets
    if isinstance(group_offset, np.integer) or not hasattr(group_offset, "dtype"):
        group_offset = np.int32(min(check_integer("group_offset", group_offset, 0), H))
    if group_offset.shape not in ((), (1,)) or not jnp.issubdtype(group_offset.dtype, jnp.integer):
        raise ValueError(
            f"group_offset is {group_offset.dtype}{list(group_offset.shape)}; it must be one integer: a number, a "
            "scalar or an array of shape (1,)."
        )
    # A clamped gather, not a dynamic slice: a shard that starts past H - G has empty groups at its end.
    most = min(H, jnp.iinfo(group_offset.dtype).max)
    first = jnp.minimum(group_offset, most).astype(jnp.int32).reshape(1)  # before the cast: it may have 64 bits
    return offsets[..., jnp.clip(first + jnp.arange(G + 1, dtype=jnp.int32), 0, H)]


@dataclasses.dataclass(frozen=True)
class Product:
    """How the two products over groups are computed: with the kernels, or what no kernel multiplies with the portable
    backend. Mixed dtypes are promoted as JAX does."""

    precision: lax.PrecisionLike
    preferred_element_type: Any
    backend: str
    plan: Plan | None

    def rows(self, lhs, rhs, offsets: jax.Array, *, transpose_rhs: bool = False) -> jax.Array:
        """`grouped_matmul`."""
        lhs, rhs, out, kernels = self._operands(lhs, rhs)
        if kernels:
            how = {"precision": self.precision, "out_dtype": out, "backend": self.backend, "plan": self.plan}
            return grouped_matmul(lhs, rhs, offsets, transpose_rhs=transpose_rhs, **how)
        ((G, K, N),) = shapes_of((rhs,), transpose_rhs)
        problem = Problem(G, lhs.shape[0], K, N, lhs.dtype.name, transpose_rhs)
        spec, lhs, rhs, offsets = self._portable(problem, out, lhs, rhs, offsets)
        return matmul(spec, lhs, (rhs,), None, offsets)

    def contraction(self, lhs, rhs, offsets: jax.Array) -> jax.Array:
        """`grouped_wgrad`."""
        lhs, rhs, out, kernels = self._operands(lhs, rhs)
        if kernels:
            how = {"precision": self.precision, "out_dtype": out, "backend": self.backend, "plan": self.plan}
            return grouped_wgrad(lhs, rhs, offsets, **how)
        shape = offsets.shape[0] - 1, lhs.shape[1], rhs.shape[1]
        problem = Problem(shape[0], lhs.shape[0], *shape[1:], lhs.dtype.name)
        spec, lhs, rhs, offsets = self._portable(problem, out, lhs, rhs, offsets)
        return wgrad(spec, (shape,), lhs, rhs, None, offsets)[0]

    def result_dtype(self, lhs, rhs) -> jnp.dtype:
        out = self.preferred_element_type
        if out is None:  # bfloat16 with float16 is multiplied in float32 and gives bfloat16, as in JAX
            one = [jax.ShapeDtypeStruct((1, 1), x.dtype) for x in (lhs, rhs)]
            out = jax.eval_shape(lax.dot, *one).dtype
        return check_dtype("preferred_element_type", out)

    def _operands(self, lhs, rhs) -> tuple[jax.Array, jax.Array, jnp.dtype, bool]:
        """Both in one dtype, the result's dtype, and whether the kernels multiply them."""
        dtype, out = jnp.promote_types(lhs.dtype, rhs.dtype), self.result_dtype(lhs, rhs)
        kernels = dtype.name in FLOATS and out.name in FLOATS and kernels_have(self.precision, dtype)
        return lhs.astype(dtype), rhs.astype(dtype), out, kernels

    def _portable(self, problem: Problem, out: jnp.dtype, lhs, rhs, offsets) -> tuple[Any, ...]:
        """For dtypes and algorithms that no kernel has: the xla backend, as JAX but without a copy of lhs for each
        group."""
        precision, dtype = self.precision, lhs.dtype
        backend = "xla" if self.backend == "auto" and self.plan is None else self.backend
        plan = make_plan(problem, device_of(lhs, rhs, offsets), backend=backend, plan=self.plan)
        if plan.backend != "xla":
            raise NotImplementedError(
                f"the {plan.backend} backend multiplies {', '.join(FLOATS)}; this is {dtype.name} into {out.name} with "
                f"precision={precision!r}. Use backend='auto' or 'xla'."
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            precision = None  # only floating-point products have one
        elif precision is None:
            precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        spec = Spec("grouped_matmul", (plan,), precision, dtype, out, dtype, dtype, problem.transpose_rhs)
        return spec, *vary_together(lhs, rhs, offsets)
