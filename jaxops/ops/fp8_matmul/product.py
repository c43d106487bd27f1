"""The differentiable core that the public functions share: which casts and which products each pass takes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxops._lib.differentiable import differentiable
from jaxops._lib.fp8 import MOST, Quantized, magnitudes
from jaxops._lib.manual_axes import vary_together
from jaxops.ops.fp8_matmul.gemm_pallas import multiply_pallas
from jaxops.ops.fp8_matmul.operand import Operand, cols_of, rows_of, shape_of
from jaxops.ops.fp8_matmul.plan import Plan
from jaxops.ops.fp8_matmul.recipes import Format, Recipe
from jaxops.ops.fp8_matmul.xla import multiply_xla
from jaxops.ops.grouped_matmul import grouped_wgrad
from jaxops.ops.quantize import quantize, quantize_measured


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in a call. Dtypes by name; w_dtype counts only where w has a gradient."""

    recipe: Recipe
    plan: Plan
    x_dtype: str
    w_dtype: str
    out_dtype: str
    pow2_scales: bool


class Operands(NamedTuple):
    """What is traced in a call.

    Attributes:
      x: [M, K], an array or Quantized.
      w: [K, N], or with offsets [G, K, N]; an array or Quantized.
      w_quantized: w cast before, or None.
      amax: largest magnitudes (of x, of w) to scale by, or None.
      offsets: [G + 1] int32, or None.
    """

    x: Any
    w: Any
    w_quantized: Quantized | None = None
    amax: tuple[jax.Array, jax.Array] | None = None
    offsets: jax.Array | None = None


def _cast(spec: Spec, x, form: Format, layouts: str, offsets=None, amax=None) -> tuple[Quantized, jax.Array | None]:
    """x quantised, and its largest magnitude where an older one is given; as it is where it comes quantised."""
    if isinstance(x, Quantized):
        return x, amax
    how: dict = {
        "dtype": form.dtype,
        "layouts": layouts,
        "pow2_scales": spec.pow2_scales,
        "backend": "xla" if spec.plan.backend == "xla" else "pallas",
    }
    if amax is not None:
        return quantize_measured(x, amax=amax, **how)
    return quantize(x, scaling=form.scaling, group_offsets=offsets, **how), None


def multiply(
    spec: Spec, pass_name: str, a: Operand, b: Operand, offsets, out_dtype: str, length: int | None = None
) -> jax.Array:
    """length: the rows of the ragged tensors whose column layouts a and b are."""
    tiles, how = (
        getattr(spec.plan, pass_name),
        {"out_dtype": jnp.dtype(out_dtype), "fast": pass_name in spec.recipe.fast},
    )
    if offsets is not None:
        how |= {"ragged": "rows"} if length is None else {"ragged": "contraction", "length": length}
    if tiles is None or tiles.kernel == "xla":
        return multiply_xla(a, b, offsets, **how)
    if tiles.kernel == "pallas":
        return multiply_pallas(a, b, offsets, **how, tiles=tiles, interpret=spec.plan.on.interpret)
    return _multiply_triton(a, b, offsets, **how, tiles=tiles, cores=spec.plan.on.cores)


def _multiply_triton(a: Operand, b: Operand, offsets, **how) -> jax.Array:
    from jaxops.ops.fp8_matmul.gemm_triton import multiply_triton  # jax-triton is imported only where it is called

    def multiply(values, scales, b_values, b_scales, offsets):
        return multiply_triton(
            Operand(values, scales, a.scaling), Operand(b_values, b_scales, b.scaling), offsets, **how
        )

    return sequential_vmap(multiply)(
        a.values, a.scales, b.values, b.scales, offsets
    )  # a call through jax-triton has no batching rule


def _multiply_inside(spec: Spec, x: jax.Array, w: Operand) -> jax.Array:
    from jaxops.ops.fp8_matmul.inside_triton import multiply_inside

    tiles = spec.plan.fwd
    assert tiles is not None  # make_plan fills it

    def multiply(x, values, scales):
        return multiply_inside(
            x,
            Operand(values, scales, w.scaling),
            out_dtype=jnp.dtype(spec.out_dtype),
            pow2=spec.pow2_scales,
            tiles=tiles,
            cores=spec.plan.on.cores,
        )

    return sequential_vmap(multiply)(x, w.values, w.scales)


class _Saved(NamedTuple):
    """What the backward reads; None where a gradient is not asked.

    Attributes:
      x: for w's gradient: x's column layout; x itself where it was cast inside the product, and with gw_hp (in half precision).
      w: for x's gradient: w's row layout, or what gives it.
      offsets: [G + 1] int32, or None.
    """

    x: Any = None
    w: Any = None
    offsets: jax.Array | None = None


def _forward(spec: Spec, operands: Operands, dx: bool, dw: bool):
    """(y, the largest magnitudes that were measured), and what the backward needs: dx and dw say which gradients are asked."""
    x, w, w_quantized, amax, offsets = operands
    recipe, (M, K), N = spec.recipe, shape_of(x), shape_of(w)[-1]
    w = w if w_quantized is None else w_quantized
    x_amax, w_amax = amax or (None, None)
    if 0 in (M, K, N, *shape_of(w)):  # sums of nothing; with nothing saved, the gradients are zeros
        measured = amax and (_largest(x, x_amax), _largest(w, w_amax))
        return (jnp.zeros((M, N), spec.out_dtype), measured), _Saved()
    wq, w_amax = _cast(spec, w, recipe.w, "both" if dx else "col", None, w_amax)
    saved_w = _saved_w(wq) if dx else None
    if spec.plan.cast == "inside" and not isinstance(x, Quantized):
        y = _multiply_inside(spec, x, cols_of(wq))
        return (y, None), _Saved(x if dw else None, saved_w)  # the backward casts x's column layout, where it needs it
    xq, x_amax = _cast(spec, x, recipe.x, "both" if dw and not recipe.gw_hp else "row", offsets, x_amax)
    y = multiply(spec, "fwd", rows_of(xq), cols_of(wq), offsets, spec.out_dtype)
    return (y, amax and (x_amax, w_amax)), _Saved(_saved_x(spec, x, xq, offsets) if dw else None, saved_w, offsets)


def _largest(x, amax):
    return amax if isinstance(x, Quantized) else jnp.minimum(jnp.max(magnitudes(x), initial=0.0), MOST)


def _saved_x(spec: Spec, x, xq: Quantized, offsets):
    if spec.recipe.gw_hp:
        if isinstance(x, Quantized):
            raise NotImplementedError(
                f"{spec.recipe.name!r} multiplies x as it is into the gradient of w: pass x itself, not a quantised tensor."
            )
        return x.astype(_half(spec))
    if xq.values_t is None or (xq.group_offsets is None) != (offsets is None):
        ragged = "" if offsets is None else " and group_offsets"
        raise NotImplementedError(
            f"the gradient of w needs x's column layout too: pass x itself, or quantised with layouts='both'{ragged}."
        )
    return dataclasses.replace(xq, values=None, scales=None)


def _half(spec: Spec) -> jnp.dtype:
    """The dtype in which gw_hp multiplies."""
    return jnp.dtype("bfloat16" if spec.x_dtype == "float32" else spec.x_dtype)


def _saved_w(wq: Quantized) -> Quantized:
    return wq if wq.values is None else dataclasses.replace(wq, values_t=None, scales_t=None)


def product(spec: Spec, operands: Operands) -> Any:
    """(y [M, N] in out_dtype, the largest magnitudes of x and w now where older ones are given, else None)."""
    x, w = (None if isinstance(value, Quantized) else value for value in operands[:2])
    others = operands._replace(x=operands.x if x is None else None, w=operands.w if w is None else None)
    # Marked outside the custom_vjp, so that JAX itself sums the gradient of what is replicated over a mesh axis.
    x, w, *rest = vary_together(x, w, *jax.tree.leaves(others))
    return _product(spec, jax.tree.structure(others), x, w, rest)


def _product_forward(spec: Spec, tree, x: jax.Array | None, w: jax.Array | None, rest: list[jax.Array]):
    """x and w where they are arrays, and so have gradients; rest: the leaves of the Operands that `tree` describes, but for those two."""
    return _forward(spec, _gather(tree, x, w, rest), dx=False, dw=False)[0]


def _gather(tree, x, w, rest) -> Operands:
    operands = jax.tree.unflatten(tree, rest)
    return operands._replace(x=operands.x if x is None else x, w=operands.w if w is None else w)


def _product_fwd(spec: Spec, tree, *primals):
    # What no gradient is asked of (the first layer's input, frozen weights) is neither cast nor saved for one.
    dx, dw = (primal is not None and primal.perturbed for primal in primals[:2])
    operands = _gather(tree, *jax.tree.map(lambda primal: primal.value, primals, is_leaf=_is_primal))
    (y, measured), saved = _forward(spec, operands, dx, dw)
    op, x, w = ("fp8_matmul", "x", "w") if operands.offsets is None else ("fp8_grouped_matmul", "lhs", "rhs")
    saved_x = _name(f"{op}.{x}", saved.x, operands.x)
    saved_w = _name(f"{op}.{w}", saved.w, operands.w if operands.w_quantized is None else operands.w_quantized)
    return (checkpoint_name(y, f"{op}.out"), measured), _Saved(saved_x, saved_w, saved.offsets)


def _name(name: str, saved, given):
    """Names what was made of a given operand; what is given came with its maker's name."""
    if isinstance(given, Quantized) or not isinstance(saved, Quantized):
        return saved if saved is None or saved.dtype == given.dtype else checkpoint_name(saved, name)
    made = checkpoint_name(dataclasses.replace(saved, group_offsets=None), name)
    return dataclasses.replace(made, group_offsets=saved.group_offsets)


def _is_primal(leaf) -> bool:
    return isinstance(leaf, CustomVJPPrimal)


def _product_bwd(spec: Spec, tree, saved: _Saved, cotangents):
    dy, _ = cotangents  # no gradient comes through what was measured
    if isinstance(dy, SymbolicZero) or (saved.x is None and saved.w is None):
        return None, None, None
    recipe, offsets = spec.recipe, saved.offsets
    layouts = [
        name
        for name, asked in (("row", saved.w is not None), ("col", saved.x is not None and not recipe.gw_hp))
        if asked
    ]
    dyq: Any = _cast(spec, dy, recipe.dy, "both" if len(layouts) == 2 else layouts[0], offsets)[0] if layouts else None
    dx = None if saved.w is None else multiply(spec, "dgrad", rows_of(dyq), rows_of(saved.w), offsets, spec.x_dtype)
    if saved.x is None:
        dw = None
    elif recipe.gw_hp:
        dw = _half_precision_dw(spec, saved.x, dy.astype(saved.x.dtype), offsets)
    else:
        xq, _ = _cast(spec, saved.x, recipe.x, "col", offsets)
        dw = multiply(spec, "wgrad", cols_of(xq), cols_of(dyq), offsets, spec.w_dtype, dy.shape[0])
    return dx, dw, None


def _half_precision_dw(spec: Spec, x: jax.Array, dy: jax.Array, offsets) -> jax.Array:
    out = jnp.dtype(spec.w_dtype)
    if offsets is not None:
        # "auto" on Hopper: grouped_wgrad's kernel for it, where that takes the shape.
        return grouped_wgrad(
            x, dy, offsets, out_dtype=out, backend="auto" if spec.plan.backend == "triton" else spec.plan.backend
        )
    accumulated = out if out == x.dtype else jnp.dtype("float32")
    return lax.dot_general(x, dy, (((0,), (0,)), ((), ())), preferred_element_type=accumulated).astype(out)


_product = differentiable(_product_forward, _product_fwd, _product_bwd, static=2, symbolic_zeros=True)
