"""The public functions: checks, then the passes; differentiation is an error."""

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
from jaxops._lib.numerics.fp8 import AMAX_MAX, FP8, SCALINGS, Quantized
from jaxops.ops.quantize.amax_pallas import line_amax_pallas
from jaxops.ops.quantize.cast_pallas import cast_pallas
from jaxops.ops.quantize.outputs import Beside, Computation, Format, Gathered, Output, kinds_of, size_of
from jaxops.ops.quantize.plan import LAYOUTS, PLANNER, Plan, Problem
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
    form = _check(x, scaling, dtype, layouts, pow2_scales, group_offsets, amax)
    return cast(x, form, layouts, group_offsets=group_offsets, amax=amax, key=key, backend=backend, plan=plan)[0]


def cast(
    source: jax.Array | Gathered | Beside,
    form: Format,
    layouts: Literal["row", "col", "both"] = "row",
    *,
    group_offsets: jax.Array | None = None,
    amax: jax.Array | None = None,
    key: jax.Array | None = None,
    measure: bool = False,
    backend: str = "auto",
    plan: Plan | None = None,
) -> tuple[Quantized, jax.Array | None]:
    """`quantize` for other ops, which have checked their operands; also of what would be a copy in memory.

    Args:
      source: a tensor; or rows of a matrix, `Gathered`, with groups and in the column layout only, and no row outside
        the groups is read; or `Beside`, two tensors, of whose columns a tile and a block of 128 may hold both. The bits
        are those of `quantize` of the copy.
      form: the scaling and dtype.
      layouts, group_offsets, amax, key, backend, plan: as in `quantize`; of a `Problem` with the copy's sizes.
      measure: with tensorwise scaling, returns the source's own largest finite magnitude, too: float32, [] or, of a
        stack, [G]. With amax given it is still one pass.

    Raises:
      NotImplementedError: a derivative; "pallas" on a GPU without FP8.
    """
    words = None if key is None else lax.bitcast_convert_type(jax.random.bits(key, (2,), jnp.uint32), jnp.int32)
    _, M, K = size_of((source,))
    dtype = jnp.dtype(jax.tree.leaves(source)[0].dtype).name
    problem = Problem(M, K, dtype, form.scaling, layouts, group_offsets is not None, isinstance(source, Gathered))
    plan, source, offsets, amax, words = PLANNER.prepare(problem, backend, plan, source, group_offsets, amax, words)
    computation = Computation(None, kinds_of((source,)), (output := Output(form, layouts),), dtype)
    arrays = _call(computation, measure, plan, source, offsets, amax, words)
    if form.scaling == "tensorwise":  # both layouts share the scale
        arrays["scales_t"] = arrays["scales"]
    row = (arrays["values"], arrays["scales"]) if output.row else (None, None)
    col = (arrays["values_t"], arrays["scales_t"]) if output.col else (None, None)
    q = Quantized(*row, *col, scaling=form.scaling, dtype=dtype, group_offsets=offsets)
    return q, arrays["amax"] if measure else None


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


def _check(x, scaling, dtype, layouts, pow2, offsets, amax) -> Format:
    check_array("x", x, "a JAX array [M, K] or [G, M, K]")
    shape = tuple(x.shape)
    if len(shape) not in (2, 3):
        raise ValueError(
            f"x has shape {shape}; it must be [M, K] or a stack [G, M, K]. Write x.reshape(-1, x.shape[-1])."
        )
    check_float("x", x, "[M, K]" if len(shape) == 2 else "[G, M, K]")
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
    return Format(scaling, fp8, check_flag("pow2_scales", pow2))


_NAMES = {"values0": "values", "scales0": "scales", "values_t0_0": "values_t", "scales_t0_0": "scales_t"}
_NAMES["measured"] = "measured"


def _passes(
    computation: Computation, measure: bool, plan: Plan, source: Any, offsets: jax.Array | None,
    amax: jax.Array | None, words: jax.Array | None,
) -> dict[str, jax.Array]:  # fmt: skip
    """The results by name: of the layouts asked values, scales, values_t, scales_t, and with measure amax; of a stack
    if the source is one."""
    (G, _, _), arrays, (output,) = size_of((source,)), jax.tree.leaves(source), computation.outputs
    amax = None if amax is None else jnp.broadcast_to(amax, (G,))
    if plan.backend == "xla" or any(0 in x.shape for x in arrays):
        results = cast_xla(output, source, offsets, amax, words, measure=measure)
    else:
        results = _by_kernels(computation, measure, plan, source, offsets, amax, words)
    return results if arrays[0].ndim == 3 else {name: value[0] for name, value in results.items()}


def _by_kernels(
    computation: Computation, measure: bool, plan: Plan, source: Any, offsets: jax.Array | None,
    amax: jax.Array | None, words: jax.Array | None,
) -> dict[str, jax.Array]:  # fmt: skip
    """The pass for the largest magnitudes, if a program of the cast does not see all that share a scale; then the
    cast.
    """
    assert plan.cast is not None  # make_plan fills both
    assert plan.amax is not None
    (output,), (G, _, K), interpret = computation.outputs, size_of((source,)), plan.on.interpret
    given, results, parts = {}, {}, None
    if output.measured:
        parts = tensor_amax(source, offsets) if amax is None else amax[:, None]
        given["amax0"] = parts
    elif output.scaling == "rowwise" and (output.col or plan.cast.cols < K):
        lines = {"row": output.row, "col": output.col, "interpret": interpret}
        row, col = line_amax_pallas(computation, plan.amax, (source,), offsets, **lines)
        if row is not None:
            results["scales"], given["row_factors0"] = output.form.scale_and_factor(row)
        if col is not None:
            results["scales_t"], given["col_factors0"] = output.form.scale_and_factor(col)
    given = {name: value.reshape(-1) for name, value in given.items()}
    if words is not None:
        given["words"] = words
    also = measure and amax is not None
    cast_arrays = cast_pallas(computation, plan.cast, (source,), offsets, given, measure=also, interpret=interpret)
    for name, value in cast_arrays.items():
        results[_NAMES[name]] = value.reshape(G, -1, *value.shape[1:])
    if output.measured:
        results["scales"] = results["scales"][:, 0]
    if measure:
        results["amax"] = jnp.minimum(jnp.max(results.pop("measured", parts), axis=1), AMAX_MAX)
    return results


def no_gradient(computation: Computation, *_):
    """The derivative of a cast."""
    hint = "differentiate jaxops.fp8_matmul, or quantise jax.lax.stop_gradient(x)."
    raise NotImplementedError(f"a cast to {computation.outputs[0].form.dtype} has no gradient of its own: {hint}")


_call = differentiable(_passes, no_gradient, no_gradient, static=3)
