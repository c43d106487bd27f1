"""The public functions: checks, then the custom_vjp that wires the passes together."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.checks import FLOATS, check_choice, check_dtype, check_float, check_number, check_offsets, check_size
from jaxops._lib.device import device_of
from jaxops._lib.differentiable import differentiable
from jaxops._lib.fp8 import BLOCK, FP8, Quantized
from jaxops._lib.manual_axes import vary_together
from jaxops._lib.tuned import tuned_rows
from jaxops.ops.adaln.bwd_pallas import backward_pallas
from jaxops.ops.adaln.fwd_pallas import forward_pallas
from jaxops.ops.adaln.plan import ACTIVATIONS, PER, STATS, Arrays, Plan, Problem, Spec, make_plan
from jaxops.ops.adaln.xla import backward_xla, forward_xla


def adaln(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    sequence_offsets: jax.Array | None = None,
    *,
    norm: Literal["layer", "rms"] = "layer",
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    epsilon: float = 1e-6,
    activation: Literal["silu", "gelu", "gelu_tanh"] | None = None,
    per: Literal["sequence", "row"] | None = None,
    out_dtype=None,
    backend: str = "auto",
    plan: Plan | None = None,
) -> Any:
    """Adaptive layer norm over packed sequences: `y[t] = act(norm(x[t]) * weight + bias) * (1 + scale[s]) + shift[s]`, s the sequence of row t.

    Sequence s is the rows `sequence_offsets[s]` to `sequence_offsets[s + 1] - 1`. Sequences may be empty and of any length; the offsets stay on the
    device and new values never recompile. Rows before the first sequence and after the last one come out zero, and what they hold reaches no output and
    no gradient. Differentiable (reverse mode) in everything but the offsets. Deterministic: sums over sequences take no atomics.

    >>> import jax.numpy as jnp, jaxops
    >>> x = jnp.array([[1., 3.], [2., 6.], [7., 7.5], [0., 9.]])
    >>> scale, shift = jnp.array([[0., 0.], [1., 1.]]), jnp.array([[0., 0.], [5., 5.]])  # two sequences: rows 0 and 1, row 2; row 3 is in none
    >>> jaxops.adaln(x, scale, shift, jnp.array([0, 2, 3], jnp.int32)).round(2)
    Array([[-1.,  1.],
           [-1.,  1.],
           [ 3.,  7.],
           [ 0.,  0.]], dtype=float32)

    Args:
      x: [T, D], bfloat16, float16 or float32. Statistics are taken in float32, the mean first.
      scale, shift: [B, D], a vector a sequence; or [T, D], a vector a row, as for timesteps of single tokens. Any of the dtypes of x.
      sequence_offsets: [B + 1] int32, non-decreasing, within 0 to T. Other values give unspecified rows, but no access out of bounds. None takes
        every row: into one sequence (scale [1, D]), or each with its own vector (scale [T, D]).
      norm: "layer", or "rms" (Zhang and Sennrich 2019, arXiv:1910.07467), which takes no mean away.
      weight, bias: [D], a learned affine map after the norm, or None.
      epsilon: a Python number, added to the variance ("layer") or mean square ("rms").
      activation: "silu", "gelu" (with erf), "gelu_tanh" (its approximation) or None, before the modulation.
      per: "sequence" where scale and shift are [B, D], "row" where they are [T, D]. None reads it from the shapes, and
        raises where both fit: with offsets and B = T.
      out_dtype: dtype of y; x.dtype by default. float8_e4m3fn or float8_e5m2 give a `Quantized` with block_1x128 scales, as `jaxops.quantize` makes,
        ready for an FP8 product; that has no gradient.
      backend: "auto" takes the Pallas kernels on a GPU and plain XLA on CPU and TPU; "pallas" (interpreted on a CPU) or "xla" runs or raises.
      plan: a `Plan`, instead of the tuned or heuristic one.

    Returns:
      [T, D] in out_dtype; for FP8 a `Quantized` of values [T, D] and float32 scales [cdiv(D, 128), T].

    Raises:
      ValueError: shapes that do not fit together, B = T without `per`, an unknown norm, activation, per or backend, an
        epsilon below 0 or not finite.
      TypeError: dtypes that the kernels do not take, an epsilon that is no Python number; forward-mode differentiation
        (JAX's own error).
      NotImplementedError: the gradient of an FP8 result.

    Residuals: named "adaln.out", "adaln.stats" (checkpoint names).

    Source: adaLN of DiT (Peebles and Xie 2022, arXiv:2212.09748); FP8 with 1x128 scales as in DeepSeek-V3 (arXiv:2412.19437).
    """
    modulation = {"scale": scale, "shift": shift}
    affine = {"weight": weight, "bias": bias}
    spec, arrays = _prepare({"x": x}, modulation, sequence_offsets, per, norm, affine, epsilon, activation, out_dtype)
    return _run(spec, arrays, backend, plan)[1]


def gated_residual_adaln(
    residual: jax.Array,
    h: jax.Array,
    gate: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    sequence_offsets: jax.Array | None = None,
    *,
    norm: Literal["layer", "rms"] = "layer",
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    epsilon: float = 1e-6,
    activation: Literal["silu", "gelu", "gelu_tanh"] | None = None,
    per: Literal["sequence", "row"] | None = None,
    out_dtype=None,
    backend: str = "auto",
    plan: Plan | None = None,
) -> tuple[jax.Array, Any]:
    """What stands between two halves of a DiT block, in one pass: `new = residual + gate[s] * h`, `y = adaln(new, scale, shift)`.

    The same as `gated_residual` and then `adaln`, to the rounding of the new residual. Rows outside all sequences keep their residual, and their
    cotangent passes straight through; their y is zero.

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
      h: [T, D], what a block's half has made of its input.
      gate, scale, shift: [B, D] or [T, D], all three alike, as in `adaln`.
      sequence_offsets, norm, weight, bias, epsilon, activation, per, out_dtype, backend, plan: as in `adaln`.

    Returns:
      (the new residual [T, D] in residual.dtype, y [T, D] in out_dtype or as `Quantized`).

    Raises:
      ValueError, TypeError, NotImplementedError: as `adaln`.

    Residuals: named "gated_residual_adaln.residual", "gated_residual_adaln.out", "gated_residual_adaln.stats" (checkpoint names).
    """
    modulation = {"gate": gate, "scale": scale, "shift": shift}
    rows, affine = {"residual": residual, "h": h}, {"weight": weight, "bias": bias}
    spec, arrays = _prepare(rows, modulation, sequence_offsets, per, norm, affine, epsilon, activation, out_dtype)
    return _run(spec, arrays, backend, plan)


def gated_residual(
    residual: jax.Array,
    h: jax.Array,
    gate: jax.Array,
    sequence_offsets: jax.Array | None = None,
    *,
    per: Literal["sequence", "row"] | None = None,
    backend: str = "auto",
    plan: Plan | None = None,
) -> jax.Array:
    """A block's end: `residual[t] + gate[s] * h[t]`, s the sequence of row t. Rows outside all sequences keep their residual.

    >>> import jax.numpy as jnp, jaxops
    >>> jaxops.gated_residual(jnp.ones((3, 1)), jnp.ones((3, 1)), jnp.array([[1.], [2.]]), jnp.array([0, 1, 2], jnp.int32)).ravel()
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
    spec, arrays = _prepare(rows, {"gate": gate}, sequence_offsets, per, None, {}, 0.0, None, None)
    return _run(spec, arrays, backend, plan)[0]


def _prepare(
    rows: dict, modulation: dict, offsets, per, norm, affine: dict, epsilon: float, activation, out_dtype
) -> tuple[Spec, Arrays]:
    """Checks every argument; the arrays of a call, and what is static in it."""
    for name, value in rows.items():
        check_float(name, value, "[T, D]")
    first, x = next(iter(rows.items()))
    T, D = x.shape
    for name, value in rows.items():
        if value.shape != x.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be that of {first}, {(T, D)}.")
    for name, value in modulation.items():
        check_float(name, value, "[B, D]")
        check_size(f"D of {name} (its columns)", value.shape[1], f"D of {first}", D)
    if offsets is not None:
        check_offsets(offsets, "sequence_offsets", "B")
    per_row = _is_per_row(per, {name: value.shape[0] for name, value in modulation.items()}, T, first, offsets)
    if offsets is None:
        offsets = jnp.asarray(np.array([0, T], np.int32))
    for name, value in affine.items():
        if value is not None:
            check_float(name, value, "[D]")
            check_size(f"len({name})", value.shape[0], f"D of {first}", D)
    check_choice("norm", norm, STATS if "scale" in modulation else (None,))
    check_choice("activation", activation, ACTIVATIONS)
    out = check_dtype("out_dtype", x.dtype if out_dtype is None else out_dtype, (*FLOATS, *FP8)).name
    spec = Spec(norm, check_number("epsilon", epsilon, 0), activation, per_row, out)
    values: dict[str, Any] = dict.fromkeys(Arrays._fields) | modulation | affine
    values |= {"x": x, "h": rows.get("h"), "offsets": offsets}
    return spec, Arrays(*vary_together(*(values[name] for name in Arrays._fields)))


def _is_per_row(per: str | None, counts: dict[str, int], T: int, first: str, offsets) -> bool:
    """Whether the modulation has a vector for each row of `first`, not for each sequence. counts: its rows, by name."""
    check_choice("per", per, (None, *PER))
    if len(set(counts.values())) > 1:
        found = ", ".join(map(str, counts.values()))
        raise ValueError(
            f"{', '.join(counts)} have {found} rows; all must have one for each sequence, or all one for each row of {first}."
        )
    names, count = " and ".join(counts), next(iter(counts.values()))
    B = 1 if offsets is None else offsets.shape[0] - 1
    allowed = {"sequence": B, "row": T} if per is None else {per: {"sequence": B, "row": T}[per]}
    if count not in allowed.values():
        said = {"sequence": f"B={B} (one a sequence)", "row": f"T={T} (one a row)"}
        said |= {"sequence": "1 (one sequence)"} if offsets is None else {}
        given = "without sequence_offsets" if offsets is None else f"with {B + 1} sequence_offsets"
        given += "" if per is None else f" and per={per!r}"
        needed = " or ".join(said[name] for name in allowed)
        raise ValueError(f"{names} have {count} rows; {given} they must have {needed}.")
    if per is None and B == T > 1:
        raise ValueError(
            f"{names} have {count} rows, and there are as many sequences as rows of {first} (B = T = {T}): "
            "pass per='sequence' if each sequence has a vector, per='row' if each row has one."
        )
    return per == "row" or (per is None and count == T != B)


def _run(spec: Spec, arrays: Arrays, backend: str, plan: Plan | None) -> tuple[Any, Any]:
    (T, D), B, device = arrays.x.shape, arrays.offsets.shape[0] - 1, device_of(arrays)
    problem = Problem(T, D, B, arrays.x.dtype.name, arrays.gate is not None, spec.out_dtype in FP8)
    plan = make_plan(problem, device, tuned_rows("adaln", device), backend=backend, plan=plan)
    results: Any = _call(spec, plan, False, arrays)
    residual, y, scales, _ = results
    return residual, y if scales is None else Quantized(y, scales, scaling="block_1x128", dtype=arrays.x.dtype.name)


def _forward(spec: Spec, plan: Plan, arrays: Arrays, save_stats: bool) -> dict[str, jax.Array]:
    (T, D), B = arrays.x.shape, arrays.offsets.shape[0] - 1
    if 0 in (T, D, B):  # nothing is in a sequence
        found = {"residual": arrays.x, "y": jnp.zeros((T, D), spec.out_dtype)}
        return found | ({"y_scales": jnp.zeros((-(-D // BLOCK), T), jnp.float32)} if spec.out_dtype in FP8 else {})
    if plan.backend == "xla":
        return forward_xla(spec, arrays)
    assert plan.fwd is not None  # make_plan fills it
    return forward_pallas(spec, plan.fwd, arrays, save_stats=save_stats, interpret=plan.on.interpret)


def _call_forward(spec: Spec, plan: Plan, save_stats: bool, arrays: Arrays) -> Any:
    """(new residual or None, y or None, scales of an FP8 y or None, the statistics that were saved: no gradient comes through them)."""
    found = _forward(spec, plan, arrays, save_stats)
    residual = found["residual"] if arrays.gate is not None else None
    y, scales = (found["y"], found.get("y_scales")) if spec.norm is not None else (None, None)
    return residual, y, scales, {name: found[name] for name in ("mean", "rstd") if name in found}


def _call_fwd(spec: Spec, plan: Plan, save_stats: bool, arrays: Arrays):
    if spec.out_dtype in FP8:
        raise NotImplementedError(
            f"a result in {spec.out_dtype} has no gradient: leave out_dtype away where it is trained, and quantise what comes out."
        )
    # _call, not _forward: a second derivative differentiates what stands here.
    results: Any = _call(spec, plan, bool(plan.save_stats), arrays)
    residual, y, scales, stats = results
    op = "adaln" if residual is None else "gated_residual" if spec.norm is None else "gated_residual_adaln"
    residual = checkpoint_name(residual, f"{op}.{'out' if spec.norm is None else 'residual'}")
    y, stats = checkpoint_name(y, f"{op}.out"), checkpoint_name(stats, f"{op}.stats")
    # The backward reads the rows that were normalised: with a gate these are the new residual, which is alive anyway, and the old one is not kept.
    rows = arrays if residual is None else arrays._replace(x=residual)
    return (residual, y, scales, stats if save_stats else {}), (rows, stats)


def _call_bwd(spec: Spec, plan: Plan, save_stats: bool, saved, cotangents):
    arrays, stats = saved
    dx_in, dy, *_ = cotangents
    return (_gradients(spec, plan, arrays, dx_in, dy, stats),)


_call = differentiable(_call_forward, _call_fwd, _call_bwd, static=3)


def _find_gradients(spec: Spec, plan: Plan, arrays: Arrays, dx_in, dy, stats: dict[str, jax.Array]) -> Any:
    """dx_in: cotangent of the new residual, or None; dy: of y, or None. The gradients as Arrays, None where there is none."""
    (T, D), B = arrays.x.shape, arrays.offsets.shape[0] - 1
    if 0 in (T, D, B):
        found = {
            name: jnp.zeros_like(value)
            for name, value in arrays._asdict().items()
            if value is not None and name != "offsets"
        }
    elif plan.backend == "xla":
        found = backward_xla(spec, arrays, dx_in, dy)
    else:
        assert plan.bwd is not None  # make_plan fills it
        found = backward_pallas(spec, plan.bwd, arrays, dx_in, dy, stats, interpret=plan.on.interpret)
    if dx_in is not None and (spec.norm is None or 0 in (T, D, B)):
        found["x"] = dx_in
    return Arrays(**(dict.fromkeys(Arrays._fields) | found))  # pyright: ignore[reportArgumentType]  # None is what custom_vjp takes for no gradient


def _gradients_fwd(spec: Spec, plan: Plan, arrays: Arrays, dx_in, dy, stats):
    return _gradients(spec, plan, arrays, dx_in, dy, stats), (arrays, dx_in, dy, stats)


def _gradients_bwd(spec: Spec, plan: Plan, saved, cotangents):
    """Second derivatives are JAX's own, of the portable backend; the statistics are functions of x there."""
    arrays, dx_in, dy, stats = saved

    def portable(arrays, dx_in, dy):
        return _find_gradients(spec, Plan("xla"), arrays, dx_in, dy, {})

    _, vjp = jax.vjp(portable, arrays, dx_in, dy)
    return (*vjp(cotangents), jax.tree.map(jnp.zeros_like, stats))


_gradients = differentiable(_find_gradients, _gradients_fwd, _gradients_bwd, static=2)
