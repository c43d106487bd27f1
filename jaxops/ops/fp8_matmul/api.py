"""The public functions, dense and over ragged groups, and their checks; product.py has the custom_vjp."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._lib.arrays.checks import (
    FLOATS,
    check_array,
    check_flag,
    check_groups,
    check_offsets,
    check_size,
    float_dtype,
    type_name,
)
from jaxops._lib.numerics.fp8 import Quantized
from jaxops._lib.planning.device import device_of
from jaxops._lib.planning.tuned import tuned_rows
from jaxops.ops.fp8_matmul.operand import shape_of
from jaxops.ops.fp8_matmul.plan import Plan, Problem, make_plan
from jaxops.ops.fp8_matmul.product import Operands, Spec, product
from jaxops.ops.fp8_matmul.recipes import RECIPES, Recipe
from jaxops.ops.quantize import Format


def fp8_matmul(
    lhs: jax.Array | Quantized,
    rhs: jax.Array | Quantized,
    *,
    recipe: str = "blockwise",
    rhs_quantized: Quantized | None = None,
    amax: tuple[jax.Array, jax.Array] | None = None,
    out_dtype=None,
    pow2_scales: bool = False,
    quantize_lhs: bool = True,
    backend: str = "auto",
    plan: Plan | None = None,
):
    """`lhs @ rhs` in FP8: the product of a linear layer and its two gradients, with their casts.

    Each tensor is cast in one pass, which writes both layouts where a gradient needs the second one. Accumulation is
    float32. Right for operands whose largest magnitudes are from 2**-92 to 2**112 / K (of a gradient M or N); above
    that results may be inf or NaN, below it zeros. Differentiable (reverse mode, first order) in lhs and rhs.
    Deterministic.

    >>> import jax, jax.numpy as jnp, jaxops
    >>> x, w = jnp.ones((2, 3, 64), jnp.bfloat16), jnp.full((64, 32), 0.5)
    >>> y, vjp = jax.vjp(lambda x, w: jaxops.fp8_matmul(x, w, recipe="tensorwise"), x, w)
    >>> y.shape, y.dtype, float(y[0, 0, 0])
    ((2, 3, 32), dtype(bfloat16), 32.0)
    >>> [(d.dtype, round(float(d.ravel()[0]), 3)) for d in vjp(jnp.ones_like(y))]
    [(dtype(bfloat16), 16.0), (dtype('float32'), 6.0)]
    >>> w8 = jaxops.quantize(w, scaling="block_128x128", layouts="col")  # once, for inference
    >>> float(jaxops.fp8_matmul(x, w8)[0, 0, 0])
    32.0

    Recipes, by torchao's names:

    | recipe | lhs | rhs | cotangent of the result | notes |
    |---|---|---|---|---|
    | tensorwise | one scale, e4m3 | one scale, e4m3 | one scale, e5m2 | the forward may accumulate in about 14 bits |
    | delayed | as tensorwise, scaled by `amax` | as lhs | as tensorwise | one pass per cast |
    | rowwise | a scale per row, e4m3 | a scale per column | a scale per row, e4m3 | as tensorwise |
    | blockwise | 1x128, e4m3 | 128x128, e4m3 | 1x128, e4m3 | DeepSeek-V3's |
    | rowwise_with_gw_hp, blockwise_with_gw_hp | | | | the gradient of rhs is a bfloat16 product, unquantized |

    Args:
      lhs: [..., K], bfloat16, float16 or float32; or [M, K] `Quantized` with the recipe's scaling, e.g. from
        `adaln(out_dtype="float8_e4m3fn")`: it has no gradient.
      rhs: [K, N], one of the same dtypes, not necessarily lhs's; or `Quantized`, by `quantize(rhs, layouts="col")` or
        `Quantized.from_deepseek`: it has no gradient. The gradient of lhs then needs its row layout, or with tensorwise
        and 128x128 scales makes it by transposing the column layout.
      recipe: see above.
      rhs_quantized: `quantize(rhs, layouts="both")` from an earlier call with the same rhs (another microbatch): rhs is
        not cast again. rhs still gets its gradient.
      amax: recipe "delayed" only, and required there: the largest magnitudes of lhs and of rhs in earlier steps, two
        float32 scalars. Larger finite numbers saturate.
      out_dtype: dtype of the result; lhs.dtype by default.
      pow2_scales: whether scales are rounded up to powers of two, for the tensors that this call quantizes.
      quantize_lhs: with False lhs, and in the backward the result's cotangent, are not cast to FP8 (float32 is to
        bfloat16), and the product converts rhs, which must be `Quantized`: for a few rows, as in decoding, where
        reading rhs bounds. Then "auto" is "pallas" on Hopper, too.
      backend: "auto" takes the fastest available: "triton" (Hopper, with jax-triton), "pallas" (Ada and later;
        interpreted on a CPU), or "xla" on CPU and TPU. A named backend runs or raises.
      plan: a `Plan`, instead of the tuned or heuristic one.

    Returns:
      [..., N] in out_dtype; with recipe "delayed" (result, (largest magnitude of lhs, of rhs)) measured in this call.

    Raises:
      ValueError: shapes that do not fit together, an unknown recipe or backend, an amax without recipe "delayed", a
        quantized tensor with another scaling than the recipe's or without the layout that is needed.
      TypeError: dtypes that the kernels do not take; forward-mode differentiation (JAX's own error).
      NotImplementedError: a GPU without FP8 (before Ada); the gradient of rhs where lhs has only one quantized layout.

    Under `vmap` each example has its own scales, in `shard_map` each shard: devices do not share scales.

    Residuals: named "fp8_matmul.lhs", "fp8_matmul.rhs", "fp8_matmul.out" (checkpoint names).

    Source: torchao's float8 recipes; 1x128 and 128x128 scales of DeepSeek-V3 (arXiv:2412.19437); formats of
      Micikevicius et al. 2022 (arXiv:2209.05433).
    """
    leading = None
    if not isinstance(lhs, Quantized):
        check_array("lhs", lhs, "a JAX array [..., K]")
        if not lhs.shape:
            raise ValueError("lhs has shape (); it must be [..., K].")
        *leading, K = lhs.shape
        lhs = lhs.reshape(math.prod(leading), K)
    operands = Operands(lhs, rhs, rhs_quantized, amax)
    out, measured = _run(operands, recipe, out_dtype, pow2_scales, quantize_lhs, backend, plan)
    out = out if leading is None else out.reshape(*leading, out.shape[-1])
    return (out, measured) if RECIPES[recipe].delayed else out


def fp8_grouped_matmul(
    lhs: jax.Array | Quantized,
    rhs: jax.Array | Quantized,
    group_offsets: jax.Array,
    *,
    recipe: str = "blockwise",
    rhs_quantized: Quantized | None = None,
    out_dtype=None,
    pow2_scales: bool = False,
    quantize_lhs: bool = True,
    backend: str = "auto",
    plan: Plan | None = None,
) -> jax.Array:
    """`grouped_matmul` in FP8: `out[rows of g] = lhs[rows of g] @ rhs[g]`, with the casts and products of `fp8_matmul`.

    Groups may be empty, unaligned and of any size; the offsets stay on the device and new values never recompile. The
    caller pads nothing: the casts of lhs and of the result's cotangent start a new block of 128 rows at each group.
    Rows outside all groups are written as zeros; their input values (NaN included) affect no output, no gradient and no
    scale. Differentiable (reverse mode, first order) in lhs and rhs; an empty group's gradient is exactly zero.
    Deterministic.

    >>> import jax.numpy as jnp, jaxops
    >>> tokens, experts = jnp.ones((6, 4)), jnp.stack([jnp.eye(4), 2 * jnp.eye(4), 3 * jnp.eye(4)])
    >>> offsets = jnp.array([0, 2, 2, 5], jnp.int32)  # expert 1 has no rows, row 5 no expert
    >>> [round(value, 3) for value in jaxops.fp8_grouped_matmul(tokens, experts, offsets)[:, 0].tolist()]
    [1.0, 1.0, 3.0, 3.0, 3.0, 0.0]

    Args:
      lhs: [M, K], bfloat16, float16 or float32; or `Quantized` with the recipe's scaling, by
        `quantize(lhs, group_offsets=group_offsets)`: it has no gradient.
      rhs: [G, K, N], one of the same dtypes, not necessarily lhs's; or `Quantized`, as in `fp8_matmul`.
      group_offsets: [G + 1] int32, non-decreasing, within 0 to M. Other values give unspecified rows, but no access out
        of bounds.
      recipe: one of `fp8_matmul`'s, but not "delayed". With tensorwise and rowwise scales each rhs[g] has its own.
      rhs_quantized, out_dtype, pow2_scales, quantize_lhs, backend, plan: as in `fp8_matmul`.

    Returns:
      [M, N] in out_dtype.

    Raises:
      ValueError, TypeError, NotImplementedError: as `fp8_matmul`.

    Residuals: named "fp8_grouped_matmul.lhs", "fp8_grouped_matmul.rhs", "fp8_grouped_matmul.out" (checkpoint names).

    Source: grouped GEMMs with 1x128 and 128x128 scales of DeepSeek-V3 (arXiv:2412.19437), whose DeepGEMM needs padded
    groups.
    """
    check_offsets(group_offsets)
    operands = Operands(lhs, rhs, rhs_quantized, offsets=group_offsets)
    check_grouped_recipe(recipe)
    return _run(operands, recipe, out_dtype, pow2_scales, quantize_lhs, backend, plan)[0]


def check_grouped_recipe(name: Any) -> Recipe:
    """The recipe of products over groups.

    Raises:
      ValueError: an unknown one, or "delayed": groups have no history.
    """
    return _recipe(name, tuple(name for name, known in RECIPES.items() if not known.delayed))


def _recipe(name: Any, recipes: tuple[str, ...]) -> Recipe:
    if not isinstance(name, str) or name not in recipes:
        raise ValueError(f"recipe={name!r}: write {', '.join(map(repr, recipes[:-1]))} or {recipes[-1]!r}.")
    return RECIPES[name]


def _run(operands: Operands, name: str, out_dtype, pow2_scales, quantize_lhs, backend: str, plan: Plan | None) -> Any:
    """(result [M, N], measured magnitudes or None), after all checks."""
    recipe, (lhs, rhs, rhs_quantized, amax, offsets) = _recipe(name, tuple(RECIPES)), operands
    rhs_shape = "[K, N]" if offsets is None else "[G, K, N]"
    M, K = _check_tensor("lhs", lhs, "[M, K]", recipe, recipe.lhs)
    *groups, k, N = _check_tensor("rhs", rhs, rhs_shape, recipe, recipe.rhs)
    check_size("K of lhs (its last axis)", K, f"K of rhs {(*groups, k, N)}", k)
    if offsets is not None:
        check_groups(offsets, "rhs.shape[0]", groups[0])
    if rhs_quantized is not None:
        if isinstance(rhs, Quantized):
            raise ValueError("rhs is quantized already: omit rhs_quantized.")
        if not isinstance(rhs_quantized, Quantized):
            raise TypeError(f"rhs_quantized is {type_name(rhs_quantized)}; pass what jaxops.quantize returns.")
        shape = _check_tensor("rhs_quantized", rhs_quantized, rhs_shape, recipe, recipe.rhs)
        if shape != (*groups, k, N):
            raise ValueError(f"rhs_quantized has shape {shape}; it must be that of rhs, {(*groups, k, N)}.")
    _check_amax(amax, recipe)
    out = float_dtype("out_dtype", lhs.dtype if out_dtype is None else out_dtype)
    device, dtype = device_of(lhs, rhs, offsets), jnp.dtype(lhs.dtype).name
    quantize_lhs = check_flag("quantize_lhs", quantize_lhs)
    _check_unquantized(quantize_lhs, lhs, rhs, recipe)
    problem = Problem(M, K, N, name, dtype, *groups, quantize_lhs=quantize_lhs)
    plan = make_plan(problem, device, tuned_rows("fp8_matmul", device), backend=backend, plan=plan)
    recipe = recipe.with_pow2_scales() if check_flag("pow2_scales", pow2_scales) else recipe
    if not quantize_lhs:  # rhs, quantized, is all there is
        recipe = dataclasses.replace(recipe, half=frozenset())
    spec = Spec(recipe, plan, dtype, jnp.dtype(rhs.dtype).name, out.name, quantize_lhs)
    return product(spec, operands)


def _check_tensor(name: str, x, shape: str, recipe: Recipe, form: Format) -> tuple[int, ...]:
    """x's shape; x is a float array, or quantized as the recipe says. shape: its rank, written like "[K, N]"."""
    quantized = isinstance(x, Quantized)
    if not quantized:
        check_array(name, x, f"a JAX array {shape}")
    elif x.values is None and x.values_t is None:
        raise ValueError(f"{name} has neither a row nor a column layout.")
    if len(shape_of(x)) != shape.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(shape_of(x))}; it must be {shape}.")
    if quantized and x.scaling != form.scaling:
        raise ValueError(f"{name} has {x.scaling} scales; recipe={recipe.name!r} takes scaling={form.scaling!r}.")
    if not quantized and (dtype := jnp.dtype(x.dtype).name) not in FLOATS:
        needed = f"{', '.join(FLOATS)} (write {name}.astype(jnp.bfloat16)), or what jaxops.quantize returns"
        raise TypeError(f"{name} is {dtype}; it must be {needed}.")
    return shape_of(x)


def _check_unquantized(quantize_lhs: bool, lhs, rhs, recipe: Recipe) -> None:
    if quantize_lhs:
        return
    if recipe.delayed:
        raise ValueError("quantize_lhs=False has nothing to scale by amax: use recipe='tensorwise'.")
    if isinstance(lhs, Quantized) or not isinstance(rhs, Quantized):
        raise ValueError("quantize_lhs=False multiplies an array lhs by a quantized rhs: pass jaxops.quantize's rhs.")


def _check_amax(amax, recipe: Recipe) -> None:
    if not recipe.delayed:
        if amax is not None:
            raise ValueError(f"recipe={recipe.name!r} computes its own scales; only recipe='delayed' takes amax.")
        return
    if not isinstance(amax, tuple) or len(amax) != 2:
        needed = "amax=(largest magnitude of lhs, of rhs) of earlier steps: two float32 scalars"
        raise ValueError(f"recipe='delayed' needs {needed}.")
    for name, value in zip(("amax[0] (of lhs)", "amax[1] (of rhs)"), amax, strict=True):
        check_array(name, value, "a float32 scalar")
        if value.shape != () or value.dtype != jnp.float32:
            raise TypeError(f"{name} is {value.dtype}{list(value.shape)}; it must be a float32 scalar.")
