"""The custom_vjp of both public functions: which tensors each pass casts, and which products it runs."""

import dataclasses
import functools
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.numerics.fp8 import AMAX_MAX, Quantized, magnitudes
from jaxops.ops.fp8_matmul.gemm_pallas import multiply_pallas
from jaxops.ops.fp8_matmul.operand import Operand, cast_in_product, cols_of, rows_of, shape_of, unquantized
from jaxops.ops.fp8_matmul.plan import Plan
from jaxops.ops.fp8_matmul.recipes import Recipe
from jaxops.ops.fp8_matmul.xla import multiply_xla
from jaxops.ops.grouped_matmul import grouped_matmul, grouped_wgrad
from jaxops.ops.quantize import Format, cast


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static arguments of a call. Dtypes by name; rhs_dtype matters only where rhs has a gradient. quantize_lhs: of
    the result's cotangent, too."""

    recipe: Recipe
    plan: Plan
    lhs_dtype: str
    rhs_dtype: str
    out_dtype: str
    quantize_lhs: bool = True

    def in_fp8(self, gradient: str) -> bool:
        """Whether a gradient, "dgrad" or "wgrad", is a product in FP8. (Without quantize_lhs rhs, quantized, is all
        there is.)"""
        return gradient not in self.recipe.half or not self.quantize_lhs


class Operands(NamedTuple):
    """The traced arguments of a call.

    Attributes:
      lhs: [M, K], an array or Quantized.
      rhs: [K, N], or with offsets [G, K, N]; an array or Quantized.
      rhs_quantized: rhs, cast before, or None.
      amax: (largest magnitude of lhs, of rhs) to scale by, or None.
      offsets: [G + 1] int32, or None.
    """

    lhs: Any
    rhs: Any
    rhs_quantized: Quantized | None = None
    amax: tuple[jax.Array, jax.Array] | None = None
    offsets: jax.Array | None = None


class _Residuals(NamedTuple):
    """What the backward reads; None where that gradient is not needed.

    Attributes:
      lhs: for the gradient of rhs: see `_saved_lhs`; or lhs itself where the forward's product has cast it.
      rhs: for the gradient of lhs: see `_saved_rhs`.
      offsets: [G + 1] int32, or None.
    """

    lhs: Any = None
    rhs: Any = None
    offsets: jax.Array | None = None


def _cast(spec: Spec, x, form: Format, layouts, offsets=None, amax=None) -> tuple[Quantized, jax.Array | None]:
    """(x quantized, its largest magnitude now where it is scaled by an earlier amax). A Quantized x is not cast."""
    if isinstance(x, Quantized):
        return x, amax
    backend, measure = "xla" if spec.plan.backend == "xla" else "pallas", amax is not None
    return cast(x, form, layouts, group_offsets=offsets, amax=amax, measure=measure, backend=backend)


def multiply(spec: Spec, pass_name: str, a: Operand, b: Operand, offsets, out_dtype: str, length: int | None = None):
    """A @ B.T by the plan's kernel. length: rows of the ragged tensors whose column layouts a and b are."""
    tiles = getattr(spec.plan, pass_name)
    how: dict = {"out_dtype": jnp.dtype(out_dtype), "fast": pass_name in spec.recipe.fast, "length": length}
    if tiles is None or tiles.kernel == "xla":
        return multiply_xla(a, b, offsets, **how)
    if tiles.kernel == "pallas":
        return multiply_pallas(a, b, offsets, **how, tiles=tiles, interpret=spec.plan.on.interpret)
    from jaxops.ops.fp8_matmul.gemm_triton import multiply_triton  # jax-triton needs Python >= 3.12

    kernel = functools.partial(multiply_triton, **how, tiles=tiles, cores=spec.plan.on.cores)
    return sequential_vmap(kernel)(a, b, offsets)  # a jax-triton call has no batching rule


def multiply_unit(
    spec: Spec, a: Operand, b: Operand, offsets: jax.Array, activation: str, save: bool,
    indices: jax.Array | None = None,
) -> tuple[Quantized, jax.Array | None]:  # fmt: skip
    """A gated unit and its cast, in one kernel with the product: see `takes_unit`.

    The same bits as by `multiply` in bfloat16, then the unit, rounded to bfloat16, then its cast. The plan's tiles of
    the forward are tiles of the unit.

    Args:
      a: [M, K] in blocks of 1x128; with indices an array [T, K] from which the kernel gathers its rows.
      b: [G, 2 * F, K] in blocks of 128x128: the weights of gate, then of up.
      save: whether the product is a result, too.
      indices: [M] int32, the number in a of each row, clamped to [0, T).

    Returns:
      The row layout of act(gate) * up [M, F], zeros in rows outside the groups; with save gate and up [M, 2 * F].
    """
    from jaxops.ops.fp8_matmul.unit_triton import unit_triton  # jax-triton needs Python >= 3.12

    how: dict = {"activation": activation, "pow2": spec.recipe.lhs.pow2, "save": save}
    kernel = functools.partial(unit_triton, **how, tiles=spec.plan.fwd, cores=spec.plan.on.cores)
    values, scales, *product = sequential_vmap(kernel)(a, b, offsets, indices)
    h = Quantized(values, scales, scaling="block_1x128", dtype="bfloat16", group_offsets=offsets)
    return h, product[0] if save else None


def _forward(spec: Spec, operands: Operands, dlhs: bool, drhs: bool):
    """((result, measured magnitudes), residuals). dlhs, drhs: which gradients are needed."""
    lhs, rhs, rhs_quantized, amax, offsets = operands
    recipe, (M, K), N = spec.recipe, shape_of(lhs), shape_of(rhs)[-1]
    lhs_amax, rhs_amax = amax or (None, None)
    if 0 in (M, K, N, *shape_of(rhs)):  # empty sums; without residuals, the gradients are zeros
        measured = amax and tuple(
            given if isinstance(x, Quantized) else jnp.minimum(jnp.max(magnitudes(x), initial=0.0), AMAX_MAX)
            for x, given in zip((lhs, rhs if rhs_quantized is None else rhs_quantized), amax, strict=True)
        )
        return (jnp.zeros((M, N), spec.out_dtype), measured), _Residuals()
    layouts = "both" if dlhs and spec.in_fp8("dgrad") else "col"
    rhs_q, rhs_amax = _cast(spec, rhs if rhs_quantized is None else rhs_quantized, recipe.rhs, layouts, None, rhs_amax)
    saved_rhs = _saved_rhs(spec, rhs, rhs_q) if dlhs else None
    by, measured = cols_of(rhs_q), None
    if not spec.quantize_lhs and not isinstance(lhs, Quantized):
        rows, saved_lhs = unquantized(lhs), None
    elif _casts_itself(lhs, spec, "fwd"):
        rows = cast_in_product(lhs, recipe.lhs)
        saved_lhs = lhs.astype(_half_precision(spec)) if "wgrad" in recipe.half else lhs
    else:
        layouts = "both" if drhs and spec.in_fp8("wgrad") else "row"
        lhs_q, lhs_amax = _cast(spec, lhs, recipe.lhs, layouts, offsets, lhs_amax)
        rows, measured = rows_of(lhs_q), amax and (lhs_amax, rhs_amax)
        saved_lhs = _saved_lhs(spec, lhs, lhs_q, offsets) if drhs else None
    out = multiply(spec, "fwd", rows, by, offsets, spec.out_dtype)
    return (out, measured), _Residuals(saved_lhs if drhs else None, saved_rhs, offsets)


def _casts_itself(x, spec: Spec, pass_name: str) -> TypeGuard[jax.Array]:
    """Whether a product casts its rows in its launch."""
    tiles = getattr(spec.plan, pass_name)
    return tiles is not None and tiles.cast_lhs and not isinstance(x, Quantized)


def _saved_rhs(spec: Spec, rhs, rhs_q: Quantized):
    """What the gradient of lhs reads: rhs's row layout, or the layout from which it is made; or rhs."""
    if spec.in_fp8("dgrad"):
        return rhs_q if rhs_q.values is None else dataclasses.replace(rhs_q, values_t=None, scales_t=None)
    if isinstance(rhs, Quantized):
        raise NotImplementedError(f"{spec.recipe.name!r} multiplies the unquantized rhs for dlhs: pass the array.")
    return rhs.astype(_half_precision(spec))


def _saved_lhs(spec: Spec, lhs, lhs_q: Quantized, offsets):
    """What the gradient of rhs reads: lhs's column layout; or lhs."""
    if not spec.in_fp8("wgrad"):
        if isinstance(lhs, Quantized):
            raise NotImplementedError(f"{spec.recipe.name!r} multiplies the unquantized lhs for drhs: pass the array.")
        return lhs.astype(_half_precision(spec))
    if lhs_q.values_t is None or (lhs_q.group_offsets is None) != (offsets is None):
        ragged = "" if offsets is None else " and group_offsets"
        needed = f"pass the array, or lhs quantized with layouts='both'{ragged}"
        raise NotImplementedError(f"the gradient of rhs needs lhs' column layout too: {needed}.")
    return dataclasses.replace(lhs_q, values=None, scales=None)


def product(spec: Spec, operands: Operands) -> Any:
    """(lhs @ rhs [M, N] in out_dtype, (largest magnitude of lhs, of rhs) now where amax is given, else None)."""
    leaves, tree = jax.tree.flatten(operands)
    # Marked outside the custom_vjp, so that JAX itself sums the gradient of an operand replicated over a mesh axis.
    return _product(spec, jax.tree.unflatten(tree, vary_together(*leaves)))


def _product_forward(spec: Spec, operands: Operands):
    return _forward(spec, operands, dlhs=False, drhs=False)[0]


def _product_fwd(spec: Spec, primals: Operands):
    # An operand without a gradient (the first layer's input, frozen weights) is neither cast nor saved for one.
    dlhs, drhs = (isinstance(primal, CustomVJPPrimal) and primal.perturbed for primal in primals[:2])
    operands = jax.tree.map(lambda primal: primal.value, primals, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    (out, measured), saved = _forward(spec, operands, dlhs, drhs)
    op = "fp8_matmul" if operands.offsets is None else "fp8_grouped_matmul"
    saved_lhs = _named(f"{op}.lhs", saved.lhs, operands.lhs)
    cast_before = isinstance(saved.rhs, Quantized) and operands.rhs_quantized is not None
    given_rhs = operands.rhs_quantized if cast_before else operands.rhs
    saved_rhs = _named(f"{op}.rhs", saved.rhs, given_rhs)
    return (checkpoint_name(out, f"{op}.out"), measured), _Residuals(saved_lhs, saved_rhs, saved.offsets)


def _named(name: str, saved, given):
    """saved, with a checkpoint name where this op made it: what the caller passed has its maker's name."""
    if isinstance(given, Quantized) or not isinstance(saved, Quantized):
        return saved if saved is None or saved.dtype == given.dtype else checkpoint_name(saved, name)
    return name_quantized(saved, name)


def name_quantized(q: Quantized, name: str) -> Quantized:
    """q with a checkpoint name; not its offsets, which are the caller's."""
    named = checkpoint_name(dataclasses.replace(q, group_offsets=None), name)
    return dataclasses.replace(named, group_offsets=q.group_offsets)


def _product_bwd(spec: Spec, saved: _Residuals, cotangents):
    dout, _ = cotangents  # the measured magnitudes have no gradient
    needs_dlhs, needs_drhs = saved.rhs is not None, saved.lhs is not None
    if isinstance(dout, SymbolicZero) or not (needs_dlhs or needs_drhs):
        return (None,)
    recipe, offsets, dlhs, drhs, dout_q = spec.recipe, saved.offsets, None, None, None
    inside = _casts_itself(dout, spec, "dgrad")
    layouts = recipe.layouts(needs_dlhs and not inside, needs_drhs)
    if spec.quantize_lhs and layouts != "none":
        dout_q: Any = _cast(spec, dout, recipe.dout, layouts, offsets)[0]
    if needs_dlhs and not spec.in_fp8("dgrad"):
        dlhs = half_precision_dgrad(spec, saved.rhs, dout, offsets)
    elif needs_dlhs:
        if not spec.quantize_lhs:
            rows = unquantized(dout)
        elif inside:
            rows = cast_in_product(dout, recipe.dout)
        else:
            rows = rows_of(dout_q)
        dlhs = multiply(spec, "dgrad", rows, rows_of(saved.rhs), offsets, spec.lhs_dtype)
    if needs_drhs and not spec.in_fp8("wgrad"):
        drhs = half_precision_wgrad(spec, saved.lhs, dout, offsets)
    elif needs_drhs:
        lhs_q, _ = _cast(spec, saved.lhs, recipe.lhs, "col", offsets)
        drhs = multiply(spec, "wgrad", cols_of(lhs_q), cols_of(dout_q), offsets, spec.rhs_dtype, dout.shape[0])
    return (Operands(dlhs, drhs),)


def _half_precision(spec: Spec) -> str:
    return "bfloat16" if spec.lhs_dtype == "float32" else spec.lhs_dtype


def _half_backend(spec: Spec) -> str:
    """On Hopper "auto" takes grouped_matmul's Gluon kernels where they have the shape."""
    return "auto" if spec.plan.backend == "triton" else spec.plan.backend


def half_precision_wgrad(spec: Spec, lhs: jax.Array, dout: jax.Array, offsets) -> jax.Array:
    """The gradient of rhs in bfloat16, or in lhs's half precision."""
    lhs, dout, out = lhs.astype(_half_precision(spec)), dout.astype(_half_precision(spec)), jnp.dtype(spec.rhs_dtype)
    if offsets is not None:
        return grouped_wgrad(lhs, dout, offsets, out_dtype=out, backend=_half_backend(spec))
    return _dot(lhs, dout, 0, out)


def half_precision_dgrad(spec: Spec, rhs: jax.Array, dout: jax.Array, offsets) -> jax.Array:
    """The gradient of lhs in bfloat16, or in lhs's half precision."""
    rhs, dout, out = rhs.astype(_half_precision(spec)), dout.astype(_half_precision(spec)), jnp.dtype(spec.lhs_dtype)
    if offsets is not None:
        how: dict = {"transpose_rhs": True, "out_dtype": out, "backend": _half_backend(spec)}
        return grouped_matmul(dout, rhs, offsets, **how)
    return _dot(dout, rhs, 1, out)


def _dot(a: jax.Array, b: jax.Array, axis: int, out: jnp.dtype) -> jax.Array:
    accumulated = out if out == a.dtype else jnp.dtype("float32")
    return lax.dot_general(a, b, (((axis,), (axis,)), ((), ())), preferred_element_type=accumulated).astype(out)


_product = differentiable(_product_forward, _product_fwd, _product_bwd, static=1, symbolic_zeros=True)
