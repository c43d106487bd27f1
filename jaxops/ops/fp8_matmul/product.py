"""The custom_vjp of both public functions: which tensors each pass casts, and which products it runs."""

import dataclasses
import functools
from typing import Any, NamedTuple

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
from jaxops.ops.fp8_matmul.operand import Operand, cols_of, rows_of, shape_of, unquantized
from jaxops.ops.fp8_matmul.plan import Plan
from jaxops.ops.fp8_matmul.recipes import Format, Recipe
from jaxops.ops.fp8_matmul.xla import multiply_xla
from jaxops.ops.grouped_matmul import grouped_wgrad
from jaxops.ops.quantize import quantize, quantize_measured


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static arguments of a call. Dtypes by name; rhs_dtype matters only where rhs has a gradient. quantize_lhs: of
    the result's cotangent, too."""

    recipe: Recipe
    plan: Plan
    lhs_dtype: str
    rhs_dtype: str
    out_dtype: str
    pow2_scales: bool
    quantize_lhs: bool = True


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
      lhs: for the gradient of rhs: lhs's column layout. With gw_hp lhs itself, in half precision; lhs itself, too,
        where the forward has cast it inside the product and a scale spans all of its rows.
      rhs: for the gradient of lhs: rhs's row layout, or the layout from which it is made.
      offsets: [G + 1] int32, or None.
    """

    lhs: Any = None
    rhs: Any = None
    offsets: jax.Array | None = None


def cast(spec: Spec, x, form: Format, layouts: str, offsets=None, amax=None) -> tuple[Quantized, jax.Array | None]:
    """(x quantized, its largest magnitude now where it is scaled by an earlier amax). A Quantized x is not cast."""
    if isinstance(x, Quantized):
        return x, amax
    backend = "xla" if spec.plan.backend == "xla" else "pallas"
    how: dict = {"dtype": form.dtype, "layouts": layouts, "pow2_scales": spec.pow2_scales, "backend": backend}
    if amax is not None:
        return quantize_measured(x, amax=amax, **how)
    return quantize(x, scaling=form.scaling, group_offsets=offsets, **how), None


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

    how: dict = {"activation": activation, "pow2": spec.pow2_scales, "save": save}
    kernel = functools.partial(unit_triton, **how, tiles=spec.plan.fwd, cores=spec.plan.on.cores)
    values, scales, *product = sequential_vmap(kernel)(a, b, offsets, indices)
    h = Quantized(values, scales, scaling="block_1x128", dtype="bfloat16", group_offsets=offsets)
    return h, product[0] if save else None


def _forward(spec: Spec, operands: Operands, dlhs: bool, drhs: bool):
    """((result, measured magnitudes), residuals). dlhs, drhs: which gradients are needed."""
    lhs, rhs, rhs_quantized, amax, offsets = operands
    recipe, (M, K), N = spec.recipe, shape_of(lhs), shape_of(rhs)[-1]
    rhs = rhs if rhs_quantized is None else rhs_quantized
    lhs_amax, rhs_amax = amax or (None, None)
    if 0 in (M, K, N, *shape_of(rhs)):  # empty sums; without residuals, the gradients are zeros
        measured = amax and tuple(
            given if isinstance(x, Quantized) else jnp.minimum(jnp.max(magnitudes(x), initial=0.0), AMAX_MAX)
            for x, given in zip((lhs, rhs), amax, strict=True)
        )
        return (jnp.zeros((M, N), spec.out_dtype), measured), _Residuals()
    rhs_q, rhs_amax = cast(spec, rhs, recipe.rhs, "both" if dlhs else "col", None, rhs_amax)
    saved_rhs = None
    if dlhs:
        saved_rhs = rhs_q if rhs_q.values is None else dataclasses.replace(rhs_q, values_t=None, scales_t=None)
    if spec.plan.cast == "inside" and not isinstance(lhs, Quantized):
        out, saved_lhs = _multiply_inside(spec, lhs, cols_of(rhs_q), drhs)
        return (out, None), _Residuals(saved_lhs, saved_rhs)
    if not spec.quantize_lhs and not isinstance(lhs, Quantized):
        out = multiply(spec, "fwd", unquantized(lhs), cols_of(rhs_q), offsets, spec.out_dtype)
        return (out, None), _Residuals(None, saved_rhs, offsets)
    lhs_q, lhs_amax = cast(spec, lhs, recipe.lhs, "both" if drhs and not recipe.gw_hp else "row", offsets, lhs_amax)
    out = multiply(spec, "fwd", rows_of(lhs_q), cols_of(rhs_q), offsets, spec.out_dtype)
    saved_lhs = _saved_lhs(spec, lhs, lhs_q, offsets) if drhs else None
    return (out, amax and (lhs_amax, rhs_amax)), _Residuals(saved_lhs, saved_rhs, offsets)


def _multiply_inside(spec: Spec, lhs: jax.Array, rhs: Operand, drhs: bool):
    """(lhs times rhs, what the gradient of rhs reads of lhs or None); the launch of the product casts lhs."""
    from jaxops.ops.fp8_matmul.inside_triton import multiply_inside

    recipe = spec.recipe
    both = drhs and not recipe.gw_hp and recipe.lhs.scaling == "block_1x128"
    how: dict = {"out_dtype": jnp.dtype(spec.out_dtype), "fast": "fwd" in recipe.fast, "both": both}
    how |= {"pow2": spec.pow2_scales, "tiles": spec.plan.fwd, "cores": spec.plan.on.cores}
    out, *columns = sequential_vmap(functools.partial(multiply_inside, **how))(lhs, rhs)
    if both:
        return out, Quantized(None, None, *columns, scaling=recipe.lhs.scaling, dtype=spec.lhs_dtype)
    return out, lhs if drhs else None  # the backward casts lhs's columns


def _saved_lhs(spec: Spec, lhs, lhs_q: Quantized, offsets):
    if spec.recipe.gw_hp:
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
    given_rhs = operands.rhs if operands.rhs_quantized is None else operands.rhs_quantized
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
    columns = needs_drhs and not recipe.gw_hp
    if spec.quantize_lhs and (needs_dlhs or columns):
        layouts = "both" if needs_dlhs and columns else "row" if needs_dlhs else "col"
        dout_q: Any = cast(spec, dout, recipe.dout, layouts, offsets)[0]
    if needs_dlhs:
        rows = rows_of(dout_q) if spec.quantize_lhs else unquantized(dout)
        dlhs = multiply(spec, "dgrad", rows, rows_of(saved.rhs), offsets, spec.lhs_dtype)
    if columns:
        lhs_q, _ = cast(spec, saved.lhs, recipe.lhs, "col", offsets)
        drhs = multiply(spec, "wgrad", cols_of(lhs_q), cols_of(dout_q), offsets, spec.rhs_dtype, dout.shape[0])
    elif needs_drhs:
        drhs = half_precision_wgrad(spec, saved.lhs, dout, offsets)
    return (Operands(dlhs, drhs),)


def _half_precision(spec: Spec) -> str:
    return "bfloat16" if spec.lhs_dtype == "float32" else spec.lhs_dtype


def half_precision_wgrad(spec: Spec, lhs: jax.Array, dout: jax.Array, offsets) -> jax.Array:
    """The gradient of rhs by the recipes with gw_hp: in bfloat16, or in lhs's half precision."""
    lhs, dout, out = lhs.astype(_half_precision(spec)), dout.astype(_half_precision(spec)), jnp.dtype(spec.rhs_dtype)
    if offsets is not None:
        # On Hopper "auto" takes grouped_wgrad's Gluon kernel where it has the shape.
        backend = "auto" if spec.plan.backend == "triton" else spec.plan.backend
        return grouped_wgrad(lhs, dout, offsets, out_dtype=out, backend=backend)
    accumulated = out if out == lhs.dtype else jnp.dtype("float32")
    return lax.dot_general(lhs, dout, (((0,), (0,)), ((), ())), preferred_element_type=accumulated).astype(out)


_product = differentiable(_product_forward, _product_fwd, _product_bwd, static=1, symbolic_zeros=True)
