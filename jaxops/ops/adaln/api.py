"""The public functions: checks, then the custom_vjp of the passes."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.arrays.checks import (
    FLOATS,
    check_choice,
    check_dtype,
    check_float,
    check_number,
    check_offsets,
    check_size,
)
from jaxops._lib.arrays.differentiable import differentiable, differentiable_as
from jaxops._lib.arrays.partitioning import Part, partitioned
from jaxops._lib.arrays.symbolic import is_symbolic
from jaxops._lib.numerics.activations import Activation, activation_name
from jaxops._lib.numerics.fp8 import BLOCK, FP8, Quantized
from jaxops.ops.adaln.kernels_pallas import backward_pallas, forward_pallas
from jaxops.ops.adaln.plan import PER, PLANNER, STATS, Arrays, Plan, Problem, Spec, Tiles, one_wave
from jaxops.ops.adaln.xla import backward_xla, forward_xla

Norm = Literal["layer", "rms"]
Per = Literal["sequence", "row"] | None


def adaln(
    x: jax.Array, scale: jax.Array, shift: jax.Array, sequence_offsets: jax.Array | None = None, *,
    norm: Norm = "layer", weight: jax.Array | None = None, bias: jax.Array | None = None, epsilon: float = 1e-6,
    activation: Activation | None = None, per: Per = None, out_dtype=None, backend: str = "auto",
    plan: Plan | None = None,
) -> Any:  # fmt: skip
    """Adaptive layer norm over packed sequences: `act(norm(x[t]) * weight + bias) * (1 + scale[s]) + shift[s]`, with s
    the sequence of row t.

    Sequence s is the rows `sequence_offsets[s]` to `sequence_offsets[s + 1] - 1`. Sequences may be empty and of any
    length; the offsets stay on the device, and new values never recompile. Rows outside all sequences are written as
    zeros; their input values (NaN included) affect no output and no gradient. Differentiable (reverse mode) in
    everything but the offsets. Deterministic: no atomics.

    >>> import jax.numpy as jnp, jaxops
    >>> x = jnp.array([[1., 3.], [2., 6.], [7., 7.5], [0., 9.]])
    >>> scale, shift = jnp.array([[0., 0.], [1., 1.]]), jnp.array([[0., 0.], [5., 5.]])
    >>> jaxops.adaln(x, scale, shift, jnp.array([0, 2, 3], jnp.int32)).round(2)  # rows 0 and 1, row 2; row 3 is outside
    Array([[-1.,  1.],
           [-1.,  1.],
           [ 3.,  7.],
           [ 0.,  0.]], dtype=float32)

    Args:
      x: [T, D], bfloat16, float16 or float32. Statistics are float32, the mean first.
      scale, shift: [B, D], a vector a sequence, or [T, D], a vector a row; any of the dtypes of x.
      sequence_offsets: [B + 1] int32, non-decreasing, within 0 to T. Other values give unspecified rows, but no access
        out of bounds. None: all rows are one sequence (scale [1, D]), or each has its own vector (scale [T, D]).
      norm: "layer", or "rms" (Zhang and Sennrich 2019, arXiv:1910.07467), which subtracts no mean.
      weight, bias: [D], a learned affine map after the norm, or None.
      epsilon: a Python number, added to the variance ("layer") or mean square ("rms").
      activation: None, or as in `jaxops.grouped_glu`: before the modulation.
      per: "sequence" if scale and shift are [B, D], "row" if they are [T, D]. None takes it from the shapes, and raises
        if both fit: with offsets and B = T.
      out_dtype: of y, x.dtype by default. float8_e4m3fn and float8_e5m2 give a `Quantized` with block_1x128 scales, as
        from `jaxops.quantize`, without gradient.
      backend: "auto" is "pallas" on a GPU and "xla" elsewhere; "pallas" (interpreted on a CPU) or "xla" runs or raises.
      plan: a `Plan`, instead of the tuned or heuristic one.

    Returns:
      [T, D] in out_dtype; for FP8 a `Quantized` of values [T, D] and float32 scales [cdiv(D, 128), T].

    Raises:
      ValueError: shapes that do not fit together, B = T without `per`, an unknown norm, activation, per or backend, an
        epsilon below 0 or not finite.
      TypeError: unsupported dtypes, an epsilon that is not a Python number; forward-mode differentiation (JAX's error).
      NotImplementedError: the gradient of an FP8 result.

    Residuals: named "adaln.out", "adaln.stats" (checkpoint names).

    Source: adaLN of DiT (Peebles and Xie 2022, arXiv:2212.09748); FP8 with 1x128 scales of DeepSeek-V3
    (arXiv:2412.19437).
    """
    modulation, affine = {"scale": scale, "shift": shift}, {"weight": weight, "bias": bias}
    spec, arrays = _check({"x": x}, modulation, sequence_offsets, per, norm, affine, epsilon, activation, out_dtype)
    return _run(spec, arrays, backend, plan)[1]


def gated_residual_adaln(
    residual: jax.Array, h: jax.Array, gate: jax.Array, scale: jax.Array, shift: jax.Array,
    sequence_offsets: jax.Array | None = None, *, norm: Norm = "layer", weight: jax.Array | None = None,
    bias: jax.Array | None = None, epsilon: float = 1e-6, activation: Activation | None = None, per: Per = None,
    out_dtype=None, backend: str = "auto", plan: Plan | None = None,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """`new = residual + gate[s] * h` and `y = adaln(new, scale, shift)` in one pass: between the halves of a DiT block.

    As `gated_residual` and then `adaln`, to the rounding of the new residual. Rows outside all sequences keep their
    residual, whose cotangent passes through unchanged; their y is zero.

    >>> import jax.numpy as jnp, jaxops
    >>> residual, h, one = jnp.zeros((3, 2)), jnp.array([[1., 3.], [4., 8.], [5., 5.]]), jnp.ones((1, 2))
    >>> new, y = jaxops.gated_residual_adaln(residual, h, 2 * one, 0 * one, one, jnp.array([0, 2], jnp.int32))
    >>> new, y.round(2)
    (Array([[ 2.,  6.],
           [ 8., 16.],
           [ 0.,  0.]], dtype=float32), Array([[0., 2.],
           [0., 2.],
           [0., 0.]], dtype=float32))

    Args:
      residual: [T, D], bfloat16, float16 or float32.
      h: [T, D], the output of a block's half.
      gate, scale, shift: [B, D] or [T, D], all three alike, as in `adaln`.
      sequence_offsets, norm, weight, bias, epsilon, activation, per, out_dtype, backend, plan: as in `adaln`.

    Returns:
      (the new residual [T, D] in residual.dtype, y [T, D] in out_dtype or as `Quantized`).

    Raises:
      ValueError, TypeError, NotImplementedError: as `adaln`.

    Residuals: named "gated_residual_adaln.residual", "gated_residual_adaln.out", "gated_residual_adaln.stats".
    """
    rows, affine = {"residual": residual, "h": h}, {"weight": weight, "bias": bias}
    modulation = {"gate": gate, "scale": scale, "shift": shift}
    spec, arrays = _check(rows, modulation, sequence_offsets, per, norm, affine, epsilon, activation, out_dtype)
    return _run(spec, arrays, backend, plan)


def gated_residual(
    residual: jax.Array, h: jax.Array, gate: jax.Array, sequence_offsets: jax.Array | None = None, *,
    per: Per = None, backend: str = "auto", plan: Plan | None = None,
) -> jax.Array:  # fmt: skip
    """The end of a block: `residual[t] + gate[s] * h[t]`, s the sequence of row t. Rows outside keep their residual.

    >>> import jax.numpy as jnp, jaxops
    >>> one, gate = jnp.ones((3, 1)), jnp.array([[1.], [2.]])
    >>> jaxops.gated_residual(one, one, gate, jnp.array([0, 1, 2], jnp.int32)).ravel()
    Array([2., 3., 1.], dtype=float32)

    Args:
      residual: [T, D], bfloat16, float16 or float32.
      h: [T, D].
      gate: [B, D] or [T, D], as scale in `adaln`.
      sequence_offsets, per, backend, plan: as in `adaln`.

    Returns:
      [T, D] in residual.dtype.

    Raises:
      ValueError, TypeError: as `adaln`.

    Residuals: named "gated_residual.out" (checkpoint names).
    """
    rows = {"residual": residual, "h": h}
    spec, arrays = _check(rows, {"gate": gate}, sequence_offsets, per, None, {}, 0.0, None, None)
    return _run(spec, arrays, backend, plan)[0]


def _check(
    rows: dict, modulation: dict, offsets, per, norm, affine: dict, epsilon: float, activation, out_dtype
) -> tuple[Spec, Arrays]:
    (first, x), *_ = rows.items()
    for name, value in rows.items():
        check_float(name, value, "[T, D]")
        if value.shape != x.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be that of {first}, {tuple(x.shape)}.")
    T, D = x.shape
    for name, value in modulation.items():
        check_float(name, value, "[B, D]")
        check_size(f"D of {name} (its columns)", value.shape[1], f"D of {first}", D)
    if offsets is not None:
        check_offsets(offsets, "sequence_offsets", "B")
    per_row = _is_per_row(per, modulation, T, first, offsets)
    for name, value in affine.items():
        if value is not None:
            check_float(name, value, "[D]")
            check_size(f"len({name})", value.shape[0], f"D of {first}", D)
    check_choice("norm", norm, STATS if "scale" in modulation else (None,))
    activation = activation_name(activation, optional=True)
    out = check_dtype("out_dtype", x.dtype if out_dtype is None else out_dtype, (*FLOATS, *FP8)).name
    if offsets is None:
        offsets = jnp.stack([jnp.int32(0), jnp.asarray(T, jnp.int32)]) if is_symbolic(T) else np.array([0, T], np.int32)
    given = {"x": x, "h": rows.get("h"), "offsets": offsets} | modulation | affine
    operands: list[Any] = [given.get(name) for name in Arrays._fields]
    spec = Spec(norm, check_number("epsilon", epsilon, 0), activation, per_row, out)
    return spec, Arrays(*operands)


def _is_per_row(per: str | None, modulation: dict, T: int, first: str, offsets) -> bool:
    """Whether the modulation has a vector for each of the T rows of `first`, not for each sequence."""
    check_choice("per", per, (None, *PER))
    count, *others = (value.shape[0] for value in modulation.values())
    if set(others) - {count}:
        needed = f"all must have one for each sequence, or all one for each row of {first}."
        raise ValueError(f"{', '.join(modulation)} have {', '.join(map(str, (count, *others)))} rows; {needed}")
    got, B = f"{' and '.join(modulation)} have {count} rows", 1 if offsets is None else offsets.shape[0] - 1
    sequences = "1 (one sequence)" if offsets is None else f"B={B} (one a sequence)"
    known = {"sequence": (B, sequences), "row": (T, f"T={T} (one a row)")}
    allowed = [known[name] for name in (PER if per is None else (per,))]
    if count not in [size for size, _ in allowed]:
        given = "without sequence_offsets" if offsets is None else f"with {B + 1} sequence_offsets"
        given += "" if per is None else f" and per={per!r}"
        raise ValueError(f"{got}; {given} they must have {' or '.join(text for _, text in allowed)}.")
    if per is None and B == T > 1:
        raise ValueError(
            f"{got}, and there are as many sequences as rows of {first} (B = T = {T}): "
            "pass per='sequence' if each sequence has a vector, per='row' if each row has one."
        )
    return per == "row" or (per is None and count == T != B)


def _run(spec: Spec, arrays: Arrays, backend: str, plan: Plan | None) -> tuple[Any, Any]:
    """The new residual (None without a gate), and y (None without norm)."""
    (T, D), B = arrays.x.shape, arrays.offsets.shape[0] - 1
    plan, arrays = PLANNER.prepare(_problem(spec, arrays), backend, plan, arrays)
    if 0 in (T, D, B):  # no row is in a sequence
        results = {"residual": arrays.x, "y": jnp.zeros((T, D), spec.out_dtype)}
        results["y_scales"] = jnp.zeros((-(-D // BLOCK), T), jnp.float32)
    else:
        results: dict[str, Any] = _call(spec, plan, False, arrays)
    y = results.get("y")
    if spec.out_dtype in FP8:
        y = Quantized(y, results["y_scales"], scaling="block_1x128", dtype=arrays.x.dtype.name)
    return results.get("residual"), y


def _problem(spec: Spec, arrays: Arrays) -> Problem:
    (T, D), B, dtype = arrays.x.shape, arrays.offsets.shape[0] - 1, jnp.dtype(arrays.x.dtype).name
    return Problem(T, D, B, dtype, arrays.gate is not None, spec.out_dtype in FP8)


def _tiles(name: str, plan: Plan, T: int, spec: Spec, arrays: Arrays) -> Tiles:
    """Tiles of a pass. T: the rows of all devices; a device's own rows are cut into programs anew."""
    tiles = getattr(plan, name)
    return tiles if arrays.x.shape[0] == T else one_wave(name, tiles, _problem(spec, arrays), plan.on)


def _axes(spec: Spec) -> dict[str, str]:
    """What `partitioned` may split of the operands, results and gradients: the rows."""
    of_modulation = "m." if spec.per_row else ".."
    rows, modulation = dict.fromkeys(("x", "h", "residual", "y"), "m."), ("gate", "scale", "shift")
    others = {"weight": ".", "bias": ".", "offsets": "#", "y_scales": ".m", "mean": "m", "rstd": "m"}
    return rows | dict.fromkeys(modulation, of_modulation) | others


def _forward(spec: Spec, plan: Plan, save_stats: bool, arrays: Arrays) -> dict[str, jax.Array]:
    """Results: residual (with a gate), y (with norm), y_scales (FP8), mean and rstd (with save_stats, no gradient)."""
    call, axes = functools.partial(_forward_part, spec, plan, save_stats, arrays.x.shape[0]), _axes(spec)
    return partitioned(call, arrays, [axes[name] for name in Arrays._fields], axes, split="m")


def _forward_part(spec: Spec, plan: Plan, save_stats: bool, T: int, _: Part, *rows: Any) -> dict[str, jax.Array]:
    arrays = Arrays(*rows)
    if plan.backend == "xla":
        return forward_xla(spec, arrays)
    tiles = _tiles("fwd", plan, T, spec, arrays)
    return forward_pallas(spec, tiles, arrays, save_stats=save_stats, interpret=plan.on.interpret)


def _call_fwd(spec: Spec, plan: Plan, save_stats: bool, arrays: Arrays):
    if spec.out_dtype in FP8:
        hint = "leave out_dtype away where it is trained, and quantise the result."
        raise NotImplementedError(f"a result in {spec.out_dtype} has no gradient: {hint}")
    # _call, not _forward: a second derivative differentiates this.
    results: dict[str, Any] = _call(spec, plan, bool(plan.save_stats), arrays)
    op = "adaln" if arrays.gate is None else "gated_residual" if spec.norm is None else "gated_residual_adaln"
    stats = {name: results.pop(name) for name in ("mean", "rstd") if name in results}
    stats = checkpoint_name(stats, f"{op}.stats")
    last = "y" if spec.norm is not None else "residual"
    results = {name: checkpoint_name(x, f"{op}.{'out' if name == last else name}") for name, x in results.items()}
    # The backward reads the normalised rows: with a gate the new residual, an output; the old one is not kept.
    rows = arrays._replace(x=results.get("residual", arrays.x))
    return results | (stats if save_stats else {}), (rows, stats)


def _call_bwd(spec: Spec, plan: Plan, save_stats: bool, saved, cotangents: dict):
    arrays, stats = saved
    return (_gradients(spec, plan, arrays, cotangents.get("residual"), cotangents.get("y"), stats),)


def _find_gradients(spec: Spec, plan: Plan, arrays: Arrays, dx_in, dy, stats: dict[str, jax.Array]) -> Any:
    """Cotangents of `arrays`, None for none. dx_in, dy: of the new residual and of y, or None."""
    call, axes = functools.partial(_backward_part, spec, plan, arrays.x.shape[0]), _axes(spec)
    given = [*(axes[name] for name in Arrays._fields), "m.", "m.", "m"]
    return _as_arrays(partitioned(call, (*arrays, dx_in, dy, stats), given, axes, split="m"))


def _backward_part(spec: Spec, plan: Plan, T: int, part: Part, *operands: Any) -> dict[str, jax.Array]:
    *rows, dx_in, dy, stats = operands
    arrays = Arrays(*rows)
    if part.first("m") is not None:  # sums of a device are rounded when they are added
        summed = ("weight", "bias") if spec.per_row else ("gate", "scale", "shift", "weight", "bias")
        wide = {name: x.astype(jnp.float32) for name in summed if (x := getattr(arrays, name)) is not None}
        arrays = arrays._replace(**wide)
    if plan.backend == "xla":
        return backward_xla(spec, arrays, dx_in, dy)
    tiles = _tiles("bwd", plan, T, spec, arrays)
    return backward_pallas(spec, tiles, arrays, dx_in, dy, stats, interpret=plan.on.interpret)


def _as_arrays(gradients: dict[str, jax.Array]) -> Arrays:
    return Arrays(**(dict.fromkeys(Arrays._fields) | gradients))  # pyright: ignore[reportArgumentType]


def _plain_gradients(spec: Spec, _, arrays: Arrays, dx_in, dy, stats: dict[str, jax.Array]) -> Arrays:
    return _as_arrays(backward_xla(spec, arrays, dx_in, dy))


_call = differentiable(_forward, _call_fwd, _call_bwd, static=3)
_gradients = differentiable_as(_find_gradients, _plain_gradients, static=2)
