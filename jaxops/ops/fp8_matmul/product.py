"""The custom_vjp of both public functions: which tensors each pass casts, and which products it runs."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.partitioning import warn_if_split
from jaxops._lib.numerics.fp8 import AMAX_MAX, Quantized, magnitudes
from jaxops.ops.fp8_matmul.gemm_pallas import multiply_pallas
from jaxops.ops.fp8_matmul.operand import Operand, operand_of, shape_of, unquantized
from jaxops.ops.fp8_matmul.plan import Plan
from jaxops.ops.fp8_matmul.recipes import SIDES, Recipe
from jaxops.ops.fp8_matmul.xla import multiply_xla
from jaxops.ops.grouped_matmul import grouped_matmul, grouped_wgrad
from jaxops.ops.quantize import cast


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

    @property
    def half_precision(self) -> str:
        """In which unquantized operands are multiplied."""
        return "bfloat16" if self.lhs_dtype == "float32" else self.lhs_dtype

    def casts_inside(self, pass_name: str) -> bool:
        """Whether a product casts its rows, if they are not quantized, in its launch."""
        tiles = getattr(self.plan, pass_name)
        return self.quantize_lhs and tiles is not None and tiles.cast_lhs


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
    """What the backward reads, each by `_saved`; None where that gradient is not needed.

    Attributes:
      lhs: for the gradient of rhs.
      rhs: for the gradient of lhs.
      offsets: [G + 1] int32, or None.
    """

    lhs: Any = None
    rhs: Any = None
    offsets: jax.Array | None = None


def _cast(spec: Spec, tensor: str, x, passes: Iterable[str], offsets=None, amax=None) -> tuple[Any, Any]:
    """(x in the layouts that these passes read, its largest magnitude now where it is scaled by an earlier amax). A
    Quantized x is not cast, nor is one that no pass reads in FP8."""
    layouts = spec.recipe.layouts(tensor, passes)
    if isinstance(x, Quantized) or layouts == "none":
        return x, amax
    backend, measure = "xla" if spec.plan.backend == "xla" else "pallas", amax is not None
    form = spec.recipe.form(tensor)
    return cast(x, form, layouts, group_offsets=offsets, amax=amax, measure=measure, backend=backend)


def multiply(spec: Spec, pass_name: str, a, b, offsets, length: int | None = None) -> jax.Array:
    """The product of a pass, by the plan's kernel; in half precision where the recipe says so.

    Args:
      a, b: its operands, see `SIDES`: Quantized, with the layout that it reads. Arrays in half precision; an array a
        where the product casts its rows, or multiplies rows that are not quantized.
      length: of "wgrad" over groups, rows of the ragged tensors whose column layouts a and b are.
    """
    out = jnp.dtype({"fwd": spec.out_dtype, "dgrad": spec.lhs_dtype, "wgrad": spec.rhs_dtype}[pass_name])
    if pass_name in spec.recipe.half:
        return _multiply_half(spec, pass_name, a, b, offsets, out)
    tiles, (side, other) = getattr(spec.plan, pass_name), SIDES[pass_name]
    if isinstance(a, Quantized):
        a = operand_of(a, side[1])
    elif spec.casts_inside(pass_name):
        form = spec.recipe.form(side[0])
        a = Operand(a, jnp.ones(1, jnp.float32), form.scaling, form)
    else:
        a = unquantized(a)
    b = operand_of(b, other[1])
    options: dict[str, Any] = {"out_dtype": out, "fast": pass_name in spec.recipe.fast, "length": length}
    if tiles is None or tiles.kernel == "xla":
        return multiply_xla(a, b, offsets, **options)
    if tiles.kernel == "pallas":
        return multiply_pallas(a, b, offsets, **options, tiles=tiles, interpret=spec.plan.on.interpret)
    from jaxops.ops.fp8_matmul.gemm_triton import multiply_triton  # jax-triton needs Python >= 3.12

    kernel = functools.partial(multiply_triton, **options, tiles=tiles, cores=spec.plan.on.cores)
    return sequential_vmap(kernel)(a, b, offsets)  # a jax-triton call has no batching rule


def _multiply_half(spec: Spec, pass_name: str, a: jax.Array, b: jax.Array, offsets, out: jnp.dtype) -> jax.Array:
    """A gradient in bfloat16, or in lhs's half precision."""
    a, b = a.astype(spec.half_precision), b.astype(spec.half_precision)
    if offsets is None:
        accumulated, axis = out if out == a.dtype else jnp.dtype("float32"), 0 if pass_name == "wgrad" else 1
        contracted = (((axis,), (axis,)), ((), ()))
        return lax.dot_general(a, b, contracted, preferred_element_type=accumulated).astype(out)
    # On Hopper "auto" takes grouped_matmul's Gluon kernels where they have the shape.
    backend = "auto" if spec.plan.backend == "triton" else spec.plan.backend
    if pass_name == "wgrad":
        return grouped_wgrad(a, b, offsets, out_dtype=out, backend=backend)
    return grouped_matmul(a, b, offsets, transpose_rhs=True, out_dtype=out, backend=backend)


def multiply_unit(
    spec: Spec, a: Quantized, b: Quantized, offsets: jax.Array, activation: str, save: bool,
    indices: jax.Array | None = None,
) -> tuple[Quantized, jax.Array | None]:  # fmt: skip
    """A gated unit and its cast, in one kernel with the product: see `takes_unit`.

    The same bits as by `multiply` in bfloat16, then the unit, rounded to bfloat16, then its cast. The plan's tiles of
    the forward are tiles of the unit.

    Args:
      a: [M, K] in blocks of 1x128; with indices an array [T, K] from which the kernel gathers its rows.
      b: [G, K, 2 * F] in blocks of 128x128: the weights of gate, then of up.
      save: whether the product is a result, too.
      indices: [M] int32, the number in a of each row, clamped to [0, T).

    Returns:
      The row layout of act(gate) * up [M, F], zeros in rows outside the groups; with save gate and up [M, 2 * F].
    """
    from jaxops.ops.fp8_matmul.unit_triton import unit_triton  # jax-triton needs Python >= 3.12

    options: dict = {"activation": activation, "pow2": spec.recipe.lhs.pow2, "save": save}
    kernel = functools.partial(unit_triton, **options, tiles=spec.plan.fwd, cores=spec.plan.on.cores)
    rows, columns = operand_of(a, "row"), operand_of(b, "col")
    values, scales, *product = sequential_vmap(kernel)(rows, columns, offsets, indices)
    h = Quantized(values, scales, scaling="block_1x128", dtype="bfloat16", group_offsets=offsets)
    return h, product[0] if save else None


def _forward(spec: Spec, operands: Operands, dlhs: bool, drhs: bool):
    """((result, measured magnitudes), residuals). dlhs, drhs: which gradients are needed."""
    lhs, rhs, rhs_quantized, amax, offsets = operands
    (M, K), N = shape_of(lhs), shape_of(rhs)[-1]
    read_rhs = rhs if rhs_quantized is None else rhs_quantized
    lhs_amax, rhs_amax = amax or (None, None)
    if 0 in (M, K, N, *shape_of(rhs)):  # empty sums; without residuals, the gradients are zeros
        measured = amax and tuple(
            given if isinstance(x, Quantized) else jnp.minimum(jnp.max(magnitudes(x), initial=0.0), AMAX_MAX)
            for x, given in zip((lhs, read_rhs), amax, strict=True)
        )
        return (jnp.zeros((M, N), spec.out_dtype), measured), _Residuals()
    passes, rows = ("fwd", *["dgrad"] * dlhs, *["wgrad"] * drhs), lhs
    columns, rhs_amax = _cast(spec, "rhs", read_rhs, passes, None, rhs_amax)
    saved_rhs = _saved(spec, "rhs", rhs, columns, offsets) if dlhs else None
    if spec.quantize_lhs and not spec.casts_inside("fwd"):
        rows, lhs_amax = _cast(spec, "lhs", lhs, passes, offsets, lhs_amax)
    saved_lhs = _saved(spec, "lhs", lhs, rows, offsets) if drhs else None
    out = multiply(spec, "fwd", rows, columns, offsets)
    return (out, amax and (lhs_amax, rhs_amax)), _Residuals(saved_lhs, saved_rhs, offsets)


def _saved(spec: Spec, tensor: str, x, cast_x, offsets) -> Any:
    """What the gradient of the other operand reads of this one: the layout of its product, or the one from which that
    is made; in half precision x. An lhs that the forward's product has cast is cast again."""
    recipe = spec.recipe
    if ("dgrad" if tensor == "rhs" else "wgrad") in recipe.half:
        if isinstance(x, Quantized):
            gradient = "dlhs" if tensor == "rhs" else "drhs"
            hint = f"{recipe.name!r} multiplies the unquantized {tensor} for {gradient}: pass the array."
            raise NotImplementedError(hint)
        return x.astype(spec.half_precision)
    if not isinstance(cast_x, Quantized):
        return cast_x
    if tensor == "rhs":
        return cast_x if cast_x.values is None else dataclasses.replace(cast_x, values_t=None, scales_t=None)
    if cast_x.values_t is None or (cast_x.group_offsets is None) != (offsets is None):
        ragged = "" if offsets is None else " and group_offsets"
        needed = f"pass the array, or lhs quantized with layouts='both'{ragged}"
        raise NotImplementedError(f"the gradient of rhs needs lhs' column layout too: {needed}.")
    return dataclasses.replace(cast_x, values=None, scales=None)


def product(spec: Spec, operands: Operands) -> Any:
    """(lhs @ rhs [M, N] in out_dtype, (largest magnitude of lhs, of rhs) now where amax is given, else None)."""
    leaves, tree = jax.tree.flatten(operands)
    # Marked outside the custom_vjp, so that JAX itself sums the gradient of an operand replicated over a mesh axis.
    leaves = vary_together(*leaves)
    if spec.plan.backend != "xla":
        leaves = warn_if_split("fp8_matmul", *leaves)
    return _product(spec, jax.tree.unflatten(tree, leaves))


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
    # What reads an array: products in half precision or of rows that are not quantized, and one that casts its rows.
    arrays = spec.recipe.half | {"dgrad"} if spec.casts_inside("dgrad") else spec.recipe.half
    passes = [*["dgrad"] * needs_dlhs, *["wgrad"] * needs_drhs]
    offsets, dout_q = saved.offsets, dout
    if spec.quantize_lhs:
        dout_q, _ = _cast(spec, "dout", dout, [name for name in passes if name not in arrays], offsets)
    dlhs = drhs = None
    if needs_dlhs:
        dlhs = multiply(spec, "dgrad", dout if "dgrad" in arrays else dout_q, saved.rhs, offsets)
    if needs_drhs:
        lhs = _cast(spec, "lhs", saved.lhs, ["wgrad"], offsets)[0]
        drhs = multiply(spec, "wgrad", lhs, dout if "wgrad" in arrays else dout_q, offsets, dout.shape[0])
    return (Operands(dlhs, drhs),)


_product = differentiable(_product_forward, _product_fwd, _product_bwd, static=1, symbolic_zeros=True)
