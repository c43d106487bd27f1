"""The public functions: checks, then the passes; differentiation is an error."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.checks import (
    check_array,
    check_choice,
    check_dtype,
    check_flag,
    check_float,
    check_offsets,
    float_dtype,
    type_name,
)
from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.numerics.fp8 import AMAX_MAX, FP8, SCALINGS, Quantized, scale_and_factor
from jaxops._lib.planning.device import device_of
from jaxops._lib.planning.tuned import tuned_rows
from jaxops.ops.quantize.amax_pallas import line_amax_pallas
from jaxops.ops.quantize.cast_pallas import cast_pallas
from jaxops.ops.quantize.outputs import Beside, Computation, Gathered, Output, kinds_of
from jaxops.ops.quantize.plan import LAYOUTS, Arrays, Plan, Problem, Spec, make_plan
from jaxops.ops.quantize.xla import cast_xla, dequantize_xla, tensor_amax


def quantize(
    x: jax.Array,
    *,
    scaling: Literal["tensorwise", "rowwise", "block_1x128", "block_128x128"] = "block_1x128",
    dtype=jnp.float8_e4m3fn,
    layouts: Literal["row", "col", "both"] = "row",
    pow2_scales: bool = False,
    key: jax.Array | None = None,
    group_offsets: jax.Array | None = None,
    amax: jax.Array | None = None,
    backend: str = "auto",
    plan: Plan | None = None,
) -> Quantized:
    """Casts a tensor to FP8 with scales, in the layout for products over its columns, over its rows, or both.

    `values * scales` is x, rounded; the largest magnitude that shares a scale becomes the largest FP8 number. NaN and
    infinities become NaN and affect no scale; zeros stay exact. Values and scales have the same bits on every device
    and backend (a NaN is a NaN). With block scales one pass over x writes both layouts, each quantised by itself: the
    second is no transpose of the first.

    >>> import jax.numpy as jnp, jaxops
    >>> x = jnp.array([[1., 2., -4.], [0., 300., 100.]])
    >>> q = jaxops.quantize(x)
    >>> q.values.astype(jnp.float32), q.scales.shape
    (Array([[ 112.,  224., -448.],
           [   0.,  448.,  144.]], dtype=float32), (1, 2))
    >>> jaxops.dequantize(q).round(1)
    Array([[  1. ,   2. ,  -4. ],
           [  0. , 300. ,  96.4]], dtype=float32)

    Args:
      x: [M, K] or a stack [G, M, K]; bfloat16, float16 or float32.
      scaling: what shares a scale: "tensorwise" a tensor (of a stack, each), "rowwise" a row, "block_1x128" 128 columns
        of a row, "block_128x128" a block of both. In the column layout rows and columns are exchanged.
      dtype: float8_e4m3fn or float8_e5m2.
      layouts: "row" gives values [M, K], "col" gives values_t [K, M], "both" both.
      pow2_scales: scales are powers of two, the least without saturation: multiplying by them does not round.
      key: rounds stochastically, by a hash of the key and the element's place: the same in both layouts. None rounds to
        nearest, ties to even.
      group_offsets: [G + 1] int32: the rows of x [M, K] are ragged groups, and in the column layout no scale spans two
        of them. values_t then has 128 * (cdiv(M, 128) + G) columns; group g starts at column 128 * sum(cdiv(sizes[:g],
        128)), zeros fill its last 128, and columns behind the last group are unspecified. Rows outside all groups are
        in no column and no tensorwise scale, but in the row layout as any other. Offsets stay on the device.
      amax: float32 scalar (or one for each tensor of a stack), with tensorwise scaling: the largest magnitude to scale
        by, instead of x's own, which saves a pass over x (delayed scaling). Larger finite numbers saturate.
      backend: "auto" is "pallas" on a GPU (from compute capability 8.9 on) and "xla" elsewhere; "pallas" (interpreted
        on a CPU) or "xla" runs or raises.
      plan: a `Plan`, instead of the tuned or heuristic one.

    Returns:
      A `Quantized`. Its scales are [], [M], [cdiv(K, 128), M] or [cdiv(M, 128), cdiv(K, 128)], in the order of the
      scalings above.

    Raises:
      ValueError: x of another rank, an unknown scaling, layout or backend, group_offsets of a stack, amax without
        tensorwise scaling.
      TypeError: dtypes that the kernels do not take.
      NotImplementedError: a derivative; 128x128 blocks of ragged groups; "pallas" on a GPU without FP8.

    Source: 1x128 and 128x128 blocks: DeepSeek-V3 (arXiv:2412.19437), 3.3.2; formats, scaling to the largest number and
    delayed scaling: Micikevicius et al. 2022 (arXiv:2209.05433); stochastic rounding: Gupta et al. 2015
    (arXiv:1502.02551).
    """
    spec = _check(x, scaling, dtype, layouts, pow2_scales, group_offsets, amax)
    words = None if key is None else lax.bitcast_convert_type(jax.random.bits(key, (2,), jnp.uint32), jnp.int32)
    return _run(spec, Arrays(x, group_offsets, amax, words), backend, plan)[0]


def quantize_measured(
    x, *, dtype=jnp.float8_e4m3fn, layouts="row", pow2_scales=False, amax=None, backend="auto", plan: Plan | None = None
) -> tuple[Quantized, jax.Array]:
    """`quantize` with tensorwise scaling, and x's own largest finite magnitude: float32, [] or, of a stack, [G].

    With amax given it is still one pass over x.
    """
    spec = dataclasses.replace(_check(x, "tensorwise", dtype, layouts, pow2_scales, None, amax), measure=True)
    return _run(spec, Arrays(x, None, amax), backend, plan)


def quantize_gathered(
    x, indices, group_offsets, *, scaling="block_1x128", dtype=jnp.float8_e4m3fn, pow2_scales=False, amax=None,
    backend="auto", plan: Plan | None = None,
) -> Quantized:  # fmt: skip
    """`quantize(x[indices], layouts="col", group_offsets=group_offsets)`, to the last bit, without the gathered copy.

    Args:
      x: [T, K] bfloat16, float16 or float32.
      indices: [R] int32, the row of x that each row is; others than 0 to T - 1 count as the nearest of these. Rows
        outside all groups are not read.
      group_offsets: [G + 1] int32, groups of the R rows.
      scaling: "tensorwise", "rowwise" or "block_1x128".
      amax, dtype, pow2_scales, backend, plan: as in `quantize`; of a `Problem` with M = R, layouts "col", ragged and
        gathered. Without amax, tensorwise and rowwise scales take a second pass over the gathered rows.

    Returns:
      A `Quantized` with values_t [K, 128 * (cdiv(R, 128) + G)] and scales_t only.

    Raises:
      ValueError, TypeError, NotImplementedError: as `quantize`; indices of another shape or dtype; rows of an x that
        has none.
    """
    check_offsets(group_offsets)
    spec = _check(x, scaling, dtype, "col", pow2_scales, group_offsets, amax)
    check_array("indices", indices, "an int32 array [R], the row of x that each row is")
    if len(indices.shape) != 1:
        raise ValueError(f"indices has shape {tuple(indices.shape)}; it must be [R], the row of x that each row is.")
    if indices.dtype != jnp.int32:
        raise TypeError(f"indices is {indices.dtype}; write indices.astype(jnp.int32).")
    if indices.shape[0] and not x.shape[0]:
        raise ValueError(f"indices has shape {tuple(indices.shape)}, but x has shape {tuple(x.shape)}: it has no rows.")
    return _run(spec, Arrays(x, group_offsets, amax, indices=indices), backend, plan)[0]


def quantize_beside(
    left, right, *, scaling="block_1x128", dtype=jnp.float8_e4m3fn, layouts="row", pow2_scales=False, amax=None,
    backend="auto", plan: Plan | None = None,
) -> Quantized:  # fmt: skip
    """`quantize(jnp.concatenate([left, right], axis=-1))`, to the last bit, without the concatenated copy.

    A tile, and a block of 128 columns, may hold columns of both.

    Args:
      left, right: [M, F] and [M, K - F], or stacks [G, M, F] and [G, M, K - F], of one dtype.
      scaling, dtype, layouts, pow2_scales, amax, backend, plan: as in `quantize`; of a `Problem` with all K columns.

    Raises:
      ValueError, TypeError, NotImplementedError: as `quantize`; left and right that do not fit together.
    """
    spec = _check(left, scaling, dtype, layouts, pow2_scales, None, amax, name="left")
    check_array("right", right, "a JAX array, the columns behind those of left")
    if right.shape[:-1] != left.shape[:-1]:
        got = f"left has shape {tuple(left.shape)}, right {tuple(right.shape)}"
        raise ValueError(f"{got}: all axes but the last must be equal.")
    if right.dtype != left.dtype:
        raise TypeError(f"left is {left.dtype} and right is {right.dtype}: cast one of them.")
    return _run(spec, Arrays(left, None, amax, right=right), backend, plan)[0]


def dequantize(q: Quantized, dtype=None) -> jax.Array:
    """The tensor of a `Quantized`: `values * scales`, from the row layout if it has one, else from the column layout.

    >>> import jax.numpy as jnp, jaxops
    >>> jaxops.dequantize(jaxops.quantize(jnp.array([[3., -448.]]), scaling="tensorwise", layouts="col"))
    Array([[   3., -448.]], dtype=float32)

    Args:
      q: from `quantize`, `Quantized.from_deepseek` or `jaxops.adaln`. `dequantize(q.T).T` takes the column layout
        first.
      dtype: of the result: bfloat16, float16 or float32; by default that of the tensor before quantisation.

    Returns:
      [M, K] or, of a stack, [G, M, K].

    Raises:
      TypeError: q is not a `Quantized`; another dtype.
      NotImplementedError: ragged groups with the column layout only, which does not hold the number of rows.
    """
    if not isinstance(q, Quantized):
        raise TypeError(f"q is {type_name(q)}; pass a result of jaxops.quantize.")
    dtype = float_dtype("dtype", q.dtype if dtype is None else dtype)
    if q.values is None and q.group_offsets is not None:
        raise NotImplementedError(
            "the padded columns of ragged groups do not hold the number of rows: quantise with layouts='row' or 'both'."
        )
    is_stack = any(x is not None and len(x.shape) == 3 for x in (q.values, q.values_t))
    out = dequantize_xla(q if is_stack else jax.tree.map(lambda leaf: leaf[None], q)).astype(dtype)
    return out if is_stack else out[0]


def _check(x, scaling, dtype, layouts, pow2, offsets, amax, name: str = "x") -> Spec:
    check_array(name, x, "a JAX array [M, K] or [G, M, K]")
    shape = tuple(x.shape)
    if len(shape) not in (2, 3):
        needed = f"[M, K] or a stack [G, M, K]. Write {name}.reshape(-1, {name}.shape[-1])."
        raise ValueError(f"{name} has shape {shape}; it must be {needed}")
    check_float(name, x, "[M, K]" if len(shape) == 2 else "[G, M, K]")
    check_choice("scaling", scaling, SCALINGS)
    check_choice("layouts", layouts, LAYOUTS)
    fp8 = check_dtype("dtype", dtype, FP8).name
    if offsets is not None:
        check_offsets(offsets)
        if len(shape) == 3:
            raise ValueError(f"x has shape {shape}, a stack; group_offsets divide the rows of one matrix [M, K].")
        if scaling == "block_128x128":
            hint = "such blocks are for weights. Use 'block_1x128' for ragged rows."
            raise NotImplementedError(f"scaling='block_128x128' does not take group_offsets: {hint}")
    if amax is not None:
        check_array("amax", amax, "a float32 scalar")
        if scaling != "tensorwise":
            hint = "leave it away, or scale 'tensorwise'."
            raise ValueError(f"amax is one number for a whole tensor, but scaling={scaling!r}: {hint}")
        if jnp.dtype(amax.dtype) != jnp.float32:
            raise TypeError(f"amax is {amax.dtype}; write amax.astype(jnp.float32).")
        if tuple(amax.shape) not in ((), shape[:-2]):
            raise ValueError(f"amax has shape {tuple(amax.shape)}; it must be () or, for a stack, ({shape[0]},).")
    return Spec(scaling, fp8, layouts, check_flag("pow2_scales", pow2))


def _run(spec: Spec, given: Arrays, backend: str, plan: Plan | None) -> tuple[Quantized, Any]:
    """The result, and x's own largest magnitude with spec.measure. The arrays are as the caller gave them: x and right
    may be no stacks, amax a scalar."""
    stack = len(given.x.shape) == 3
    if not stack:
        right = None if given.right is None else given.right[None]
        given = given._replace(x=given.x[None], right=right)
    if given.amax is not None:
        given = given._replace(amax=jnp.broadcast_to(given.amax, (given.x.shape[0],)))
    arrays = Arrays(*vary_together(*given))
    (_, M, K), dtype, offsets = arrays.shape, jnp.dtype(arrays.x.dtype).name, given.offsets
    problem = Problem(M, K, dtype, spec.scaling, spec.layouts, offsets is not None, given.indices is not None)
    device = device_of(arrays)
    plan = make_plan(problem, device, tuned_rows("quantize", device), backend=backend, plan=plan)
    found: dict = _call(spec, plan, arrays)
    if not stack:
        found = {name: value[0] for name, value in found.items()}
    if spec.scaling == "tensorwise":  # both layouts share the scale
        found["scales_t"] = found["scales"]
    row = (found["values"], found["scales"]) if spec.row else (None, None)
    col = (found["values_t"], found["scales_t"]) if spec.col else (None, None)
    q = Quantized(*row, *col, scaling=spec.scaling, dtype=problem.dtype, group_offsets=offsets)
    return q, found.get("amax")


_NAMES = {"values0": "values", "scales0": "scales", "values_t0_0": "values_t", "scales_t0_0": "scales_t"}
_NAMES["measured"] = "measured"


def _source(arrays: Arrays) -> Any:
    """The operand of the cast."""
    if arrays.indices is not None:
        return Gathered(arrays.x[0], arrays.indices)
    return arrays.x if arrays.right is None else Beside(arrays.x, arrays.right)


def _passes(spec: Spec, plan: Plan, arrays: Arrays) -> dict[str, jax.Array]:
    """The pass for the largest magnitudes, if a program of the cast does not see all that share a scale; then the
    cast.
    """
    if plan.backend == "xla" or arrays.is_empty:
        return cast_xla(spec, arrays)
    assert plan.cast is not None  # make_plan fills both
    assert plan.amax is not None
    interpret, given, found, parts = plan.on.interpret, {}, {}, None
    operands = (_source(arrays),)
    output = Output(spec.scaling, spec.fp8, spec.layouts)
    dtype = jnp.dtype(arrays.x.dtype).name
    computation = Computation(None, kinds_of(operands), (output,), dtype, 0, spec.pow2)
    if spec.scaling == "tensorwise":
        parts = tensor_amax(arrays) if arrays.amax is None else arrays.amax[:, None]
        given["amax0"] = parts
    elif spec.scaling == "rowwise" and (spec.col or plan.cast.cols < arrays.shape[2]):
        how = {"row": spec.row, "col": spec.col, "interpret": interpret}
        row, col = line_amax_pallas(computation, plan.amax, operands, arrays.offsets, **how)
        if row is not None:
            found["scales"], given["row_factors0"] = scale_and_factor(row, spec.fp8, spec.pow2)
        if col is not None:
            found["scales_t"], given["col_factors0"] = scale_and_factor(col, spec.fp8, spec.pow2)
    given = {name: value.reshape(-1) for name, value in given.items()}
    if arrays.words is not None:
        given["words"] = arrays.words
    measure = spec.measure and arrays.amax is not None
    results = cast_pallas(computation, plan.cast, operands, arrays.offsets, given, measure=measure, interpret=interpret)
    for name, value in results.items():
        found[_NAMES[name]] = value.reshape(arrays.shape[0], -1, *value.shape[1:])
    if spec.scaling == "tensorwise":
        found["scales"] = found["scales"][:, 0]
    if spec.measure:
        found["amax"] = jnp.minimum(jnp.max(found.pop("measured", parts), axis=1), AMAX_MAX)
    return found


def _no_gradient(spec: Spec, *_):
    hint = "differentiate jaxops.fp8_matmul, or quantise jax.lax.stop_gradient(x)."
    raise NotImplementedError(f"a cast to {spec.fp8} has no gradient of its own: {hint}")


_call = differentiable(_passes, _no_gradient, _no_gradient, static=2)
