"""The three passes wired together: `matmul` and `wgrad`, each one's gradient in terms of the other, so that they have
any order."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap

from jaxops._lib.arrays.differentiable import differentiable, differentiable_as
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.partitioning import Part, partitioned
from jaxops._lib.arrays.precision import named_cast, resolve_precision
from jaxops.ops.grouped_matmul.fwd_pallas import fwd_pallas
from jaxops.ops.grouped_matmul.modalities import Shapes, launches, shapes_of
from jaxops.ops.grouped_matmul.plan import Plan, Tiles
from jaxops.ops.grouped_matmul.wgrad_pallas import wgrad_pallas
from jaxops.ops.grouped_matmul.xla import fwd_xla, wgrad_xla

Arrays = tuple[jax.Array, ...]


def _kernels() -> dict[str, Callable]:
    from jaxops.ops.grouped_matmul import gemm_triton  # jax-triton is imported where it is called

    return {"fwd": gemm_triton.fwd_triton, "wgrad": gemm_triton.wgrad_triton}


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in a call.

    Attributes:
      name: of the op, for residuals.
      plans: one a modality; one in all for one array of weights.
      lhs_dtype, rhs_dtype: of the operands as they were passed, which are their gradients' dtypes; of a wgrad: of lhs
        and dout.
      kernels: the launcher of each pass of the Hopper kernels for several modalities.
    """

    name: str
    plans: tuple[Plan, ...]
    precision: lax.PrecisionLike
    compute_dtype: jnp.dtype
    out_dtype: jnp.dtype
    lhs_dtype: jnp.dtype
    rhs_dtype: jnp.dtype
    transpose_rhs: bool = False
    kernels: Callable[[], dict[str, Callable]] = _kernels

    @property
    def backend(self) -> str:
        return self.plans[0].backend

    def inner(self, out_dtype, transpose_rhs: bool) -> "Spec":
        """For a product inside a differentiation rule, whose operands are in the compute dtype. One that reads rhs the
        other way is this product's dgrad, and its own dgrad is this product's forward."""
        c, plans = jnp.dtype(self.compute_dtype), self.plans
        if transpose_rhs != self.transpose_rhs:
            plans = tuple(plan.swapped for plan in plans)
        return Spec(self.name, plans, self.precision, c, jnp.dtype(out_dtype), c, c, transpose_rhs, self.kernels)


def _launch(name: str, spec: Spec, tiles: Tiles, *operands, **statics) -> Any:
    """One kernel launch of the forward ("fwd") or of the weight gradient ("wgrad")."""
    device = spec.plans[0].on
    if tiles.kernel == "triton":
        kernels = _kernels() if statics["parts"] is None else spec.kernels()
        kernel = functools.partial(kernels[name], tiles=tiles, cores=device.cores, **statics)
        return sequential_vmap(kernel)(*operands)  # a call through jax-triton has no batching rule
    kernel = fwd_pallas if name == "fwd" else wgrad_pallas
    return kernel(*operands, tiles=tiles, precision=spec.precision, interpret=device.interpret, **statics)


def _wide(spec: Spec) -> Spec:
    """For a part of a sum, which is rounded once."""
    dtype = jnp.dtype(spec.out_dtype)
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
    return dataclasses.replace(spec, out_dtype=wide)


def _launches(spec: Spec, name: str, shapes: Shapes) -> list:
    """(tiles, parts) of each launch; parts is None for one array of weights."""
    tiles = [getattr(plan, name) for plan in spec.plans]
    return [(tiles[0], None)] if len(shapes) == 1 else launches(shapes, tiles)


def _multiply(spec: Spec, lhs: jax.Array, rhs: Arrays, bias: jax.Array | None, offsets: jax.Array) -> jax.Array:
    one = len(rhs) == 1  # several arrays of weights have other columns each: only the rows are split
    axes = ("mk", ".nk" if spec.transpose_rhs else ".kn", ".n", "#") if one else ("m.", "...", "..", "#")
    call, out = functools.partial(_multiply_part, spec), "mn" if one else "m."
    return partitioned(call, (lhs, rhs, bias, offsets), axes, out, split="mkn")


def _multiply_part(spec: Spec, part: Part, lhs, rhs: Arrays, bias, offsets: jax.Array) -> jax.Array:
    if (first := part.first("k")) is not None:
        spec, bias = _wide(spec), None if bias is None else jnp.where(first, bias, 0)
    lhs, rhs = lhs.astype(spec.compute_dtype), tuple(w.astype(spec.compute_dtype) for w in rhs)
    shapes = shapes_of(rhs, spec.transpose_rhs)
    out = jax.ShapeDtypeStruct((lhs.shape[0], max(N for _, _, N in shapes)), spec.out_dtype)
    zeros = vary_together(jnp.zeros(out.shape, out.dtype), offsets)[0]
    if 0 in (*out.shape, offsets.shape[0] - 1):
        return zeros
    if lhs.shape[1] == 0:  # an empty sum, to which the bias is added: the same as one column of zeros
        (G, _, N), *_ = shapes
        lhs = jnp.zeros((lhs.shape[0], 1), lhs.dtype)
        rhs = (jnp.zeros((G, N, 1) if spec.transpose_rhs else (G, 1, N), lhs.dtype),) if len(rhs) == 1 else rhs
        lhs, rhs, _ = vary_together(lhs, rhs, offsets)
    statics: dict[str, Any] = {"out": out, "transpose_rhs": spec.transpose_rhs}
    if spec.backend == "xla":
        return fwd_xla(lhs, rhs, bias, offsets, precision=spec.precision, **statics)
    result = None
    for tiles, parts in _launches(spec, "fwd", shapes):
        weights = rhs if parts is None else tuple(rhs[part.number] for part in parts)
        extra = bias if parts is None else result
        result = _launch("fwd", spec, tiles, lhs, weights, extra, offsets, parts=parts, **statics)
    return zeros if result is None else result


def _matmul_fwd(spec: Spec, lhs, rhs, bias, offsets):
    # The casts are kept for the backward: as many bytes as a second cast would read again. The call goes through the
    # custom_vjp itself, so that this rule can be differentiated again.
    lhs = named_cast(lhs, spec.compute_dtype, f"{spec.name}.lhs")
    rhs = tuple(w.astype(spec.compute_dtype) for w in rhs)
    out = matmul(spec.inner(spec.out_dtype, spec.transpose_rhs), lhs, rhs, bias, offsets)
    return checkpoint_name(out, f"{spec.name}.out"), (lhs, rhs, bias, offsets)


def _matmul_bwd(spec: Spec, residuals, dout):
    lhs, rhs, bias, offsets = residuals
    dout = dout.astype(spec.compute_dtype)
    dlhs = matmul(spec.inner(spec.lhs_dtype, not spec.transpose_rhs), dout, rhs, None, offsets)
    left, right = (dout, lhs) if spec.transpose_rhs else (lhs, dout)
    drhs = wgrad(spec.inner(spec.rhs_dtype, spec.transpose_rhs), shapes_of(rhs), left, right, None, offsets)
    dbias = None if bias is None else sums_of_groups(dout, offsets, plan=spec.plans[0], out_dtype=bias.dtype)
    return dlhs, drhs, dbias, None


def sums_of_groups(
    rows: jax.Array, offsets: jax.Array, weights: jax.Array | None = None, *, plan: Plan, out_dtype
) -> jax.Array:
    """[G, N], each group's sum over its rows of rows [M, N], times weights [M] float32, as the weight gradient of a
    column of ones or weights: in float32, deterministic, without atomics. plan: filled by `make_plan`."""
    M, c = rows.shape[0], rows.dtype
    columns = [jnp.ones(M, c) if weights is None else weights.astype(c)]
    if weights is not None and c != jnp.float32:
        # What the first column lost by rounding. XLA leaves out a cast to bfloat16 and back, but not this.
        rounded = lax.reduce_precision(weights, jnp.finfo(c).nexp, jnp.finfo(c).nmant)
        columns.append((weights - rounded).astype(c))
    lhs, _ = vary_together(jnp.stack(columns, axis=1), rows)
    if plan.wgrad is not None:
        narrow: dict[str, Any] = {
            "kernel": "pallas", "ping_pong": False, "bm": 16, "bn": min(plan.wgrad.bn, 128), "warps": 4, "tail": 0,
            "split": 1,
        }  # fmt: skip
        plan = dataclasses.replace(plan, wgrad=dataclasses.replace(plan.wgrad, **narrow))
    spec = Spec("grouped_matmul", (plan,), lax.Precision.HIGHEST, c, jnp.dtype(jnp.float32), c, c)
    shapes = ((offsets.shape[0] - 1, len(columns), rows.shape[1]),)
    sums: Any = wgrad(spec, shapes, lhs, rows, None, offsets)
    return jnp.sum(sums[0], axis=1).astype(out_dtype)


def _multiply_wgrad(
    spec: Spec, shapes: Shapes, lhs: jax.Array, dout: jax.Array, accumulator: jax.Array | None, offsets: jax.Array
) -> Any:
    """Of each modality [G, K, N] as `shapes`: its groups' rows of lhs's first K columns times dout's first N ones."""
    axes, out = (("mk", "mn", ".kn", "#"), ".kn") if len(shapes) == 1 else (("m.", "m.", "...", "#"), "...")
    call = functools.partial(_multiply_wgrad_part, spec, shapes)
    return partitioned(call, (lhs, dout, accumulator, offsets), axes, out, split="mkn")


def _multiply_wgrad_part(spec: Spec, shapes: Shapes, part: Part, lhs, dout, accumulator, offsets: jax.Array) -> Any:
    if (first := part.first("m")) is not None:
        spec = _wide(spec)
        accumulator = None if accumulator is None else jnp.where(first, accumulator, 0).astype(spec.out_dtype)
    if len(shapes) == 1:  # of this device's columns
        shapes = ((shapes[0][0], lhs.shape[1], dout.shape[1]),)
    lhs, dout = lhs.astype(spec.compute_dtype), dout.astype(spec.compute_dtype)
    statics: dict[str, Any] = {"shapes": shapes, "out_dtype": spec.out_dtype}
    gradients = [vary_together(jnp.zeros(shape, spec.out_dtype), offsets)[0] for shape in shapes]
    if lhs.shape[0] == 0 or all(0 in shape for shape in shapes):
        return tuple(gradients) if accumulator is None else (accumulator,)
    if spec.backend == "xla":
        return tuple(wgrad_xla(lhs, dout, accumulator, offsets, precision=spec.precision, **statics))
    for tiles, parts in _launches(spec, "wgrad", shapes):
        results = _launch("wgrad", spec, tiles, lhs, dout, accumulator, offsets, parts=parts, **statics)
        for i, result in zip([0] if parts is None else [part.number for part in parts], results, strict=True):
            gradients[i] = result
    return tuple(gradients)


def _wgrad_fwd(spec: Spec, shapes: Shapes, lhs, dout, accumulator, offsets):
    accumulated = None if accumulator is None else ()  # all that the backward needs of it
    out = tuple(checkpoint_name(x, "grouped_wgrad.out") for x in wgrad(spec, shapes, lhs, dout, accumulator, offsets))
    return out, (lhs, dout, accumulated, offsets)


def _wgrad_bwd(spec: Spec, shapes: Shapes, residuals, cotangents):
    lhs, dout, accumulated, offsets = residuals
    lhs, dout, *weights = (x.astype(spec.compute_dtype) for x in (lhs, dout, *cotangents))
    weights = tuple(weights)
    # Of a transposed call lhs and dout have changed places, and so have these two products.
    dlhs = matmul(spec.inner(spec.lhs_dtype, True), dout, weights, None, offsets)
    ddout = matmul(spec.inner(spec.rhs_dtype, False), lhs, weights, None, offsets)
    return dlhs, ddout, None if accumulated is None else cotangents[0], None


matmul = differentiable(_multiply, _matmul_fwd, _matmul_bwd, static=1)
wgrad = differentiable(_multiply_wgrad, _wgrad_fwd, _wgrad_bwd, static=2)


def grouped_matmul_sum(
    lhs: Arrays,
    rhs: Arrays,
    group_offsets: jax.Array,
    *,
    plan: Plan,
    transpose_rhs: bool = False,
    precision=None,
    out_dtype=None,
) -> jax.Array:
    """`sum_i grouped_matmul(lhs[i], rhs[i], group_offsets)` of one or two pairs of equal shapes and dtype, added in
    float32 and rounded once; on Hopper one kernel. For ops that build on this one: nothing is checked, and plan is
    filled by `make_plan`."""
    c = lhs[0].dtype
    out = jnp.dtype(c if out_dtype is None else out_dtype)
    precision, _ = resolve_precision(precision, c)
    *operands, group_offsets = vary_together(*lhs, *rhs, group_offsets)
    spec = Spec("grouped_matmul", (plan,), precision, c, out, c, c, transpose_rhs)
    left, right = operands[: len(lhs)], operands[len(lhs) :]
    full = 0 not in (*lhs[0].shape, *rhs[0].shape)
    hopper = len(lhs) > 1 and plan.fwd is not None and plan.fwd.kernel == "triton" and full
    result: Any = (_sum_in_one if hopper else _sum)(spec, tuple(left), tuple(right), group_offsets)
    return result


def _sum(spec: Spec, lhs: Arrays, rhs: Arrays, offsets: jax.Array) -> jax.Array:
    """A product for each pair."""
    wide = spec if len(lhs) == 1 else dataclasses.replace(spec, out_dtype=jnp.dtype("float32"))
    products: Any = [matmul(wide, a, (b,), None, offsets) for a, b in zip(lhs, rhs, strict=True)]
    return functools.reduce(jnp.add, products).astype(spec.out_dtype)


def _sum_on_hopper(spec: Spec, lhs: Arrays, rhs: Arrays, offsets: jax.Array) -> jax.Array:
    """Both products in one kernel."""
    (plan,), ((_, _, N), _) = spec.plans, shapes_of(rhs, spec.transpose_rhs)
    out = jax.ShapeDtypeStruct((lhs[0].shape[0], N), spec.out_dtype)
    assert plan.fwd is not None
    statics: dict[str, Any] = {"parts": None, "out": out, "transpose_rhs": spec.transpose_rhs}
    return _launch("fwd", spec, plan.fwd, lhs, rhs, None, offsets, **statics)


_sum_in_one = differentiable_as(_sum_on_hopper, _sum, static=1)
