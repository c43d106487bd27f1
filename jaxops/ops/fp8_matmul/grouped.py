"""The public function over ragged groups of rows."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops._lib.checks import check_flag, check_offsets, check_size
from jaxops._lib.device import device_of
from jaxops._lib.fp8 import Quantized
from jaxops._lib.tuned import tuned_rows
from jaxops.ops.fp8_matmul.checks import check_cache, check_out_dtype, check_tensor
from jaxops.ops.fp8_matmul.plan import Plan, Problem, make_plan
from jaxops.ops.fp8_matmul.product import Operands, Spec, product
from jaxops.ops.fp8_matmul.recipes import RECIPES, find_recipe

_RECIPES = tuple(name for name, recipe in RECIPES.items() if not recipe.delayed)


def fp8_grouped_matmul(
    lhs: jax.Array | Quantized,
    rhs: jax.Array | Quantized,
    group_offsets: jax.Array,
    *,
    recipe: str = "blockwise",
    rhs_quantized: Quantized | None = None,
    out_dtype=None,
    pow2_scales: bool = False,
    backend: str = "auto",
    plan: Plan | None = None,
) -> jax.Array:
    """`grouped_matmul` in FP8: `out[rows of g] = lhs[rows of g] @ rhs[g]`, with the casts and the products of `fp8_matmul`.

    Groups may be empty, unaligned and of any size; the offsets stay on the device and new values never recompile. Nothing is padded by the caller: the
    cast of lhs and of the result's gradient starts a new block of 128 rows at each group. Rows outside all groups come out zero, and what they hold
    reaches no output, no gradient and no scale. Differentiable (reverse mode, once) in lhs and rhs; an empty group's gradient is exactly zero.
    Deterministic.

    >>> import jax.numpy as jnp, jaxops
    >>> tokens, experts = jnp.ones((6, 4)), jnp.stack([jnp.eye(4), 2 * jnp.eye(4), 3 * jnp.eye(4)])
    >>> out = jaxops.fp8_grouped_matmul(tokens, experts, jnp.array([0, 2, 2, 5], jnp.int32))  # expert 1 has no rows, row 5 no expert
    >>> [round(value, 3) for value in out[:, 0].tolist()]
    [1.0, 1.0, 3.0, 3.0, 3.0, 0.0]

    Args:
      lhs: [M, K], bfloat16, float16 or float32; or `Quantized` as the recipe wants it, by `quantize(lhs, group_offsets=group_offsets)`: it has no
        gradient.
      rhs: [G, K, N], one of the same dtypes (of its own); or `Quantized`, by `quantize(rhs, layouts="col")` or `Quantized.from_deepseek`: it has no
        gradient.
      group_offsets: [G + 1] int32, non-decreasing, within 0 to M. Other values give unspecified rows, but no access out of bounds.
      recipe: one of `fp8_matmul`'s, but not "delayed". With tensorwise and rowwise scales each rhs[g] has its own.
      rhs_quantized: `quantize(rhs, layouts="both")`, kept from an earlier call with the same rhs; rhs' gradient is as without.
      out_dtype, pow2_scales, backend, plan: as in `fp8_matmul`.

    Returns:
      [M, N] in out_dtype.

    Raises:
      ValueError, TypeError, NotImplementedError: as `fp8_matmul`.

    Residuals: named "fp8_grouped_matmul.lhs", "fp8_grouped_matmul.rhs", "fp8_grouped_matmul.out" (checkpoint names).

    Source: grouped GEMMs with 1x128 and 128x128 scales as in DeepSeek-V3 (arXiv:2412.19437), whose DeepGEMM needs padded groups.
    """
    chosen = find_recipe(recipe, _RECIPES)
    M, K = check_tensor("lhs", lhs, "[M, K]", chosen, chosen.x)
    G, k, N = check_tensor("rhs", rhs, "[G, K, N]", chosen, chosen.w)
    check_offsets(group_offsets)
    check_size("K of lhs (its columns)", K, f"K of rhs {(G, k, N)}", k)
    check_size("len(group_offsets)", group_offsets.shape[0], "rhs.shape[0] + 1 (G groups have G + 1 offsets)", G + 1)
    check_cache("rhs_quantized", rhs_quantized, "rhs", rhs, "[G, K, N]", chosen)
    out = check_out_dtype(out_dtype, lhs)
    device = device_of(lhs, rhs, group_offsets)
    problem = Problem(M, K, N, recipe, jnp.dtype(lhs.dtype).name, G)
    plan = make_plan(problem, device, tuned_rows("fp8_matmul", device), backend=backend, plan=plan)
    spec = Spec(chosen, plan, problem.dtype, jnp.dtype(rhs.dtype).name, out, check_flag("pow2_scales", pow2_scales))
    results: Any = product(spec, Operands(lhs, rhs, rhs_quantized, None, group_offsets))
    return results[0]
