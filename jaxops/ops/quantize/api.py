"""The public functions: checks, then the passes, and the error where someone asks for a gradient."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.checks import (
    check_array,
    check_choice,
    check_dtype,
    check_flag,
    check_float,
    check_offsets,
    float_dtype,
)
from jaxops._lib.device import device_of
from jaxops._lib.differentiable import differentiable
from jaxops._lib.fp8 import FP8, MOST, SCALINGS, Quantized, scale_and_factor
from jaxops._lib.manual_axes import vary_together
from jaxops._lib.tuned import tuned_rows
from jaxops.ops.quantize.amax_pallas import line_amax_pallas, tensor_amax_pallas
from jaxops.ops.quantize.cast_pallas import cast_pallas
from jaxops.ops.quantize.plan import LAYOUTS, Arrays, Plan, Problem, Spec, make_plan
from jaxops.ops.quantize.xla import cast_xla, dequantize_xla


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
    """Casts a tensor to FP8 with scales, in the layout that a product over its columns reads, the one that a product over its rows reads, or both.

    `values * scales` is x again, to the rounding; the largest magnitude that shares a scale becomes the largest FP8
    number. NaN and infinities become NaN and reach no scale; zeros come back exactly. Values and scales are the same to
    the last bit on every device and backend (of a NaN, that it is one). One pass over x writes both layouts with block
    scales, each quantised by itself: the second is no transpose of the first.

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
      scaling: what shares a scale: the "tensorwise" whole (of a stack, each tensor), a "rowwise" row, "block_1x128" 128 columns of a row, or
        "block_128x128" a block of both. In the column layout rows and columns change places.
      dtype: float8_e4m3fn or float8_e5m2.
      layouts: "row" gives values [M, K], "col" gives values_t [K, M], "both" both.
      pow2_scales: scales are powers of two, the least that saturate nothing: they multiply without rounding.
      key: rounds stochastically, up or down in proportion to the distance, by a hash of the key and the element's place: the same in both layouts.
        None rounds to nearest, ties to even.
      group_offsets: [G + 1] int32: the rows of x [M, K] are ragged groups, and in the column layout no scale spans two of them. Group g's columns of
        values_t then start at 128 times the number of blocks before it, `sum(cdiv(sizes[:g], 128))`, and zeros fill up its last block; there are
        128 * (cdiv(M, 128) + G) in all, with unspecified columns behind the last group. Rows outside all groups are in no column and in no tensorwise
        scale; the row layout has them as any other. Offsets stay on the device.
      amax: float32 scalar (or one for each tensor of a stack), with tensorwise scaling: the largest magnitude to scale by, instead of x's own. Finite
        numbers that are larger become the largest FP8 number (they saturate). That saves a pass over x; delayed scaling takes it from steps before.
      backend: "auto" takes the Pallas kernels on a GPU (from compute capability 8.9 on) and plain XLA elsewhere; "pallas" (interpreted on a CPU) or
        "xla" runs or raises.
      plan: a `Plan`, instead of the tuned or heuristic one.

    Returns:
      A `Quantized`. Its scales have the shape [], [M], [cdiv(K, 128), M] or [cdiv(M, 128), cdiv(K, 128)], in the order of the scalings above.

    Raises:
      ValueError: x of another rank, an unknown scaling, layout or backend, group_offsets of a stack, amax without tensorwise scaling.
      TypeError: dtypes that the kernels do not take.
      NotImplementedError: a derivative; 128x128 blocks of ragged groups; a GPU without FP8, on the pallas backend.

    Source: 1x128 and 128x128 blocks: DeepSeek-V3 (arXiv:2412.19437), 3.3.2; formats, scaling to the largest number and delayed scaling: Micikevicius et
    al. 2022 (arXiv:2209.05433); stochastic rounding: Gupta et al. 2015 (arXiv:1502.02551).
    """
    spec = _check(x, scaling, dtype, layouts, group_offsets, amax)
    return _run(
        dataclasses.replace(spec, pow2=check_flag("pow2_scales", pow2_scales)),
        x,
        key,
        group_offsets,
        amax,
        backend,
        plan,
    )[0]


def quantize_measured(
    x: jax.Array,
    *,
    dtype=jnp.float8_e4m3fn,
    layouts: Literal["row", "col", "both"] = "row",
    pow2_scales: bool = False,
    amax: jax.Array | None = None,
    backend: str = "auto",
    plan: Plan | None = None,
) -> tuple[Quantized, jax.Array]:
    """`quantize` with tensorwise scaling, and x's own largest finite magnitude: float32, [] or, of a stack, [G].

    With amax given it is still one pass over x.
    """
    spec = _check(x, "tensorwise", dtype, layouts, None, amax)
    return _run(
        dataclasses.replace(spec, pow2=check_flag("pow2_scales", pow2_scales), measure=True),
        x,
        None,
        None,
        amax,
        backend,
        plan,
    )


def dequantize(q: Quantized, dtype=None) -> jax.Array:
    """The tensor that a `Quantized` holds: `values * scales`, from the row layout, or from the column layout where there is no other.

    >>> import jax.numpy as jnp, jaxops
    >>> jaxops.dequantize(jaxops.quantize(jnp.array([[3., -448.]]), scaling="tensorwise", layouts="col"))
    Array([[   3., -448.]], dtype=float32)

    Args:
      q: from `quantize`, `Quantized.from_deepseek`, or `jaxops.adaln`. `dequantize(q.T).T` takes the column layout where there are both.
      dtype: of the result: bfloat16, float16 or float32; by default the dtype of the tensor before.

    Returns:
      [M, K] or, of a stack, [G, M, K].

    Raises:
      TypeError: q is no `Quantized`; another dtype.
      NotImplementedError: ragged groups of which only the column layout is there: the number of rows is not known any more.
    """
    if not isinstance(q, Quantized):
        raise TypeError(f"q is a {type(q).__name__}; pass what jaxops.quantize gave.")
    dtype = float_dtype("dtype", q.dtype if dtype is None else dtype)
    if q.values is None and q.group_offsets is not None:
        raise NotImplementedError(
            "the padded columns of ragged groups do not say how many rows there were: quantise with layouts='row' or 'both'."
        )
    *stack, M, K = q.values.shape if q.values is not None else q.values_t.mT.shape  # pyright: ignore[reportOptionalMemberAccess]  # one is there
    shape = (stack[0] if stack else 1, M, K)
    arrays = q if stack else jax.tree.map(lambda leaf: leaf[None], q)
    out = dequantize_xla(arrays, shape)
    return out.reshape(*stack, M, K).astype(dtype)


def _run(spec: Spec, x, key, offsets, amax, backend: str, plan: Plan | None) -> tuple[Quantized, Any]:
    *stack, M, K = x.shape
    words = None if key is None else lax.bitcast_convert_type(jax.random.bits(key, (2,), jnp.uint32), jnp.int32)
    if amax is not None:
        amax = jnp.broadcast_to(amax, (stack[0] if stack else 1,))
    arrays = Arrays(*vary_together(x if stack else x[None], offsets, amax, words))
    problem = Problem(M, K, jnp.dtype(x.dtype).name, spec.scaling, spec.layouts, offsets is not None)
    device = device_of(arrays)
    plan = make_plan(problem, device, tuned_rows("quantize", device), backend=backend, plan=plan)
    found: dict = _call(spec, plan, arrays)
    if not stack:
        found = {name: value[0] for name, value in found.items()}
    if spec.scaling == "tensorwise":  # one scale serves both layouts
        found["scales_t"] = found["scales"]
    row = (found["values"], found["scales"]) if spec.row else (None, None)
    col = (found["values_t"], found["scales_t"]) if spec.col else (None, None)
    q = Quantized(*row, *col, scaling=spec.scaling, dtype=problem.dtype, group_offsets=offsets)
    return q, found.get("amax")


def _check(x, scaling, dtype, layouts, offsets, amax) -> Spec:
    check_array("x", x, "a JAX array [M, K] or [G, M, K]")
    if len(x.shape) not in (2, 3):
        raise ValueError(
            f"x has shape {tuple(x.shape)}; it must be [M, K] or a stack [G, M, K]. Write x.reshape(-1, x.shape[-1])."
        )
    check_float("x", x, "[M, K]" if len(x.shape) == 2 else "[G, M, K]")
    check_choice("scaling", scaling, SCALINGS)
    check_choice("layouts", layouts, LAYOUTS)
    fp8 = check_dtype("dtype", dtype, FP8).name
    if offsets is not None:
        check_offsets(offsets)
        if len(x.shape) == 3:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, a stack; group_offsets divide the rows of one matrix [M, K]."
            )
        if scaling == "block_128x128":
            raise NotImplementedError(
                "scaling='block_128x128' does not take group_offsets: such blocks are for weights. Use 'block_1x128' for ragged rows."
            )
    if amax is not None:
        check_array("amax", amax, "a float32 scalar")
        if scaling != "tensorwise":
            raise ValueError(
                f"amax is one number for a whole tensor, but scaling={scaling!r}: leave it away, or scale 'tensorwise'."
            )
        if jnp.dtype(amax.dtype) != jnp.float32:
            raise TypeError(f"amax is {amax.dtype}; write amax.astype(jnp.float32).")
        if tuple(amax.shape) not in ((), tuple(x.shape[:-2])):
            raise ValueError(f"amax has shape {tuple(amax.shape)}; it must be () or, for a stack, ({x.shape[0]},).")
    return Spec(scaling, fp8, layouts)


def _passes(spec: Spec, plan: Plan, arrays: Arrays) -> dict[str, jax.Array]:
    """The pass that finds the largest magnitudes, where a program of the cast does not see enough; then the cast."""
    G, M, K = arrays.x.shape
    if plan.backend == "xla" or 0 in (G, M, K):
        return cast_xla(spec, arrays)
    assert plan.cast is not None  # make_plan fills both
    assert plan.amax is not None
    factors, found = {}, {}
    if spec.scaling == "tensorwise":
        given = arrays.amax
        factors["amax"] = (
            tensor_amax_pallas(plan.amax, arrays, interpret=plan.on.interpret) if given is None else given[:, None]
        )
    elif spec.scaling == "rowwise" and (spec.col or plan.cast.cols < arrays.x.shape[2]):
        lines = line_amax_pallas(plan.amax, arrays, row=spec.row, col=spec.col, interpret=plan.on.interpret)
        for name, amax in zip(("row", "col"), lines, strict=True):
            if amax is not None:
                found["scales" if name == "row" else "scales_t"], factors[f"{name}_factors"] = scale_and_factor(
                    amax, spec.fp8, spec.pow2
                )
    found |= cast_pallas(spec, plan.cast, arrays, factors, interpret=plan.on.interpret)
    if spec.measure:
        found["amax"] = jnp.minimum(jnp.max(found.pop("now", factors["amax"]), axis=1), MOST)
    return found


def _call_forward(spec: Spec, plan: Plan, arrays: Arrays) -> dict[str, jax.Array]:
    return _passes(spec, plan, arrays)


def _call_fwd(spec: Spec, plan: Plan, arrays: Arrays):
    raise NotImplementedError(
        f"a cast to {spec.fp8} has no gradient of its own: differentiate jaxops.fp8_matmul, or quantise jax.lax.stop_gradient(x)."
    )


def _call_bwd(spec: Spec, plan: Plan, saved, cotangents):
    raise NotImplementedError  # _call_fwd has raised


_call = differentiable(_call_forward, _call_fwd, _call_bwd, static=2)
