"""The public function: checks, then the custom_vjp that wires products and activation together."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap

from jaxops._lib.arrays.checks import (
    check_choice,
    check_float,
    check_groups,
    check_offsets,
    check_size,
    compute_dtype_of,
    type_name,
)
from jaxops._lib.arrays.differentiable import differentiable, differentiable_as
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.partitioning import Part, partitioned
from jaxops._lib.arrays.precision import named_cast, resolve_precision
from jaxops._lib.numerics.activations import UnitActivation, activation_name
from jaxops._lib.planning.device import device_of
from jaxops._lib.planning.tuned import tuned_rows
from jaxops.ops.grouped_glu.fwd_pallas import fwd_pallas
from jaxops.ops.grouped_glu.plan import SAVES, Biases, FusedTiles, Halves, Plan, Problem, Spec, make_plan
from jaxops.ops.grouped_glu.unit_pallas import unit_bwd_pallas, unit_fwd_pallas
from jaxops.ops.grouped_glu.xla import bwd_xla, fwd_xla
from jaxops.ops.grouped_matmul import grouped_matmul, grouped_matmul_sum, grouped_wgrad, sums_of_groups


def grouped_glu(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None,
    group_offsets: jax.Array,
    *,
    biases: tuple[jax.Array | None, jax.Array | None] | None = None,
    activation: UnitActivation = "silu",
    compute_dtype=None,
    precision: lax.PrecisionLike = None,
    save: Literal["preactivations", "nothing"] = "preactivations",
    backend: str = "auto",
    plan: Plan | None = None,
) -> jax.Array:
    """A gated linear unit for each group of rows: `h[rows of g] = act(x[rows of g] @ w_gate[g]) * (x[rows of g] @
    w_up[g])`, with biases added to the products.

    The first half of a mixture of experts' experts (SwiGLU with "silu"); `grouped_matmul` with the down projection is
    the second. Groups, rows outside them, offsets and determinism: as in `grouped_matmul`. Differentiable (reverse
    mode, any order) in x, weights and biases; the gradients of an empty group are exactly zero. The gradient of x is
    summed over both products in float32.

    >>> import jax.numpy as jnp, jaxops
    >>> x, w = jnp.array([[1., 4.], [2., 3.], [5., 5.]]), jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
    >>> offsets = jnp.array([0, 1, 2], jnp.int32)  # row 2 is in no group
    >>> jaxops.grouped_glu(x, w, 10 * w, offsets, activation="relu")
    Array([[ 10., 160.],
           [160., 360.],
           [  0.,   0.]], dtype=float32)

    Args:
      x: [M, K], bfloat16, float16 or float32.
      w_gate: [G, K, F]; x's dtype unless compute_dtype is given.
      w_up: [G, K, F], w_gate's dtype; or None if w_gate is [G, K, 2 F], gate's columns before up's, as checkpoints
        store them: then forward, gradient of x and weight gradient are one product each.
      group_offsets: [G + 1] int32, non-decreasing, from 0 to M. Other values give unspecified rows, but no access out
        of bounds.
      biases: None, or one for each of w_gate and w_up (or None): [G, its columns], of any of the dtypes, added in
        float32. With one array of weights `([G, 2 F], None)`. Their gradients are summed in float32.
      activation: of the gate, in float32, after rounding the gate to the compute dtype: "silu" ("swish"), "gelu" (the
        exact one, by erf), "gelu_tanh" ("gelu_pytorch_tanh"), "relu", "relu2" (its square), "sigmoid"; or one of
        jax.nn's functions silu, gelu (a functools.partial with `approximate`, too), relu, sigmoid. Or "swiglu_oai"
        ("swigluoai"), gpt-oss' unit: with gate at most 7, and up between -7 and 7, `gate * sigmoid(1.702 * gate) * (up
        + 1)`; no gradient where they are clamped.
      compute_dtype: x and the weights are cast to it, and the pre-activations have it. Float32 weights keep float32
        gradients that are never rounded to it.
      precision: of float32 products, as in `grouped_matmul`.
      save: "preactivations" keeps gate and up [M, F] for the backward; "nothing" multiplies again there.
      backend: "auto" takes the kernels on a GPU (one kernel forward for few rows, and on Hopper with Python >= 3.12),
        XLA on a CPU or TPU. "triton", "pallas" (interpreted on a CPU) or "xla" runs or raises.
      plan: a `Plan` instead of the tuned or heuristic one.

    Returns:
      [M, F] in x's dtype.

    Raises:
      ValueError: shapes that do not fit, an unknown activation, save or backend.
      TypeError: dtypes that the kernels do not multiply, dtypes that differ without compute_dtype, biases that are no
        tuple; forward-mode differentiation (JAX's own error).
      NotImplementedError: a precision algorithm that the kernels do not have.

    Residuals: "grouped_glu.x" (its cast), "grouped_glu.gate", "grouped_glu.up", "grouped_glu.gate_up",
    "grouped_glu.out"
      (checkpoint names).

    Source: Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202).
    """
    check_float("x", x, "[M, K]")
    check_float("w_gate", w_gate, "[G, K, F]" if w_up is not None else "[G, K, 2 F]")
    check_offsets(group_offsets)
    G, K, N = w_gate.shape
    check_size("K of x (its columns)", x.shape[1], f"K of w_gate {tuple(w_gate.shape)}", K)
    check_groups(group_offsets, "w_gate.shape[0]", G)
    if w_up is None:
        if N % 2:
            raise ValueError(
                f"w_gate has shape {tuple(w_gate.shape)}; without w_up it must be [G, K, 2 F], gate's columns and "
                "then up's: an even number."
            )
    else:
        check_float("w_up", w_up, "[G, K, F]")
        if w_up.shape != w_gate.shape:
            raise ValueError(f"w_up has shape {tuple(w_up.shape)}; it must be that of w_gate, {tuple(w_gate.shape)}.")
        if w_up.dtype != w_gate.dtype:
            raise TypeError(f"w_up is {w_up.dtype} and w_gate is {w_gate.dtype}: cast one of them.")
    compute = compute_dtype_of("x", x, "w_gate", w_gate, compute_dtype, "the weights' gradients stay")
    precision, compute = resolve_precision(precision, compute)
    act: str = activation_name(activation, unit=True)
    check_choice("save", save, SAVES)
    device = device_of(x, w_gate, group_offsets)
    problem = Problem(
        G, x.shape[0], K, N if w_up is not None else N // 2, compute.name, w_up is None, x.dtype != compute
    )
    plan = make_plan(problem, device, tuned_rows("grouped_glu", device, "grouped_matmul"), backend=backend, plan=plan)
    x_dtype, w_dtype = jnp.dtype(x.dtype), jnp.dtype(w_gate.dtype)
    spec = Spec(plan, act, save == "preactivations", precision, compute, x_dtype, w_dtype, x_dtype)
    weights = (w_gate,) if w_up is None else (w_gate, w_up)
    of_weights = check_biases(biases, {"w_gate": w_gate, "w_up": w_up})
    result: Any = _glu(spec, False, *vary_together(x, weights, of_weights, group_offsets))
    return result[0]


def check_biases(biases: Any, weights: dict[str, Any]) -> Biases:
    """A bias or None for each of the weights [G, K, N] that are not None, from one for each of all, or None.

    Raises:
      ValueError, TypeError: biases that do not fit the weights.
    """
    if biases is None:
        return (None,) * sum(w is not None for w in weights.values())
    names = ", ".join(weights)
    if not isinstance(biases, tuple) or len(biases) != len(weights):
        got = f"a tuple of {len(biases)}" if isinstance(biases, tuple) else type_name(biases)
        raise TypeError(f"biases is {got}; pass a tuple of a bias, or None, for each of {names}.")
    for (name, w), bias in zip(weights.items(), biases, strict=True):
        if bias is None:
            continue
        if w is None:
            raise ValueError(f"biases has one for {name}, which is None: write None, and the bias beside its weights.")
        check_float(f"the bias of {name}", bias, "[G, N]")
        if bias.shape != (needed := (w.shape[0], w.shape[2])):
            got = f"the bias of {name} has shape {tuple(bias.shape)}"
            raise ValueError(f"{got}; it must be {needed}, a row for each group of {name} {tuple(w.shape)}.")
    return tuple(bias for w, bias in zip(weights.values(), biases, strict=True) if w is not None)


def biases_of_units(biases: Biases, weights: Halves) -> jax.Array | None:
    """Gate's and up's biases as one array [G, 2 F] float32, gate's columns first; None without any."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    full = [jnp.zeros(w.shape[::2], jnp.float32) if b is None else b.astype(jnp.float32) for b, w in pairs]
    return jnp.concatenate(full, axis=1)


def glu_of_rows(
    x: jax.Array, weights: Halves, biases: Biases, group_offsets: jax.Array, row_indices: jax.Array | None = None, *,
    activation: str, precision, plan: Plan, save: bool,
) -> tuple[jax.Array, Halves]:  # fmt: skip
    """h [M, F], and with save the pre-activations, of x and weights of one dtype. For ops that build on this one:
    nothing is checked, and plan is filled by `make_plan`. With row_indices [M] (a plan with `fused` only, no gradient)
    row m is `x[row_indices[m]]`."""
    if row_indices is not None:
        bias = biases_of_units(biases, weights)
        return _fused(plan, save, activation, precision, x, weights, bias, group_offsets, row_indices)
    dtype = jnp.dtype(x.dtype)
    spec = Spec(plan, activation, True, precision, dtype, dtype, dtype, dtype)
    result: Any = _glu(spec, save, *vary_together(x, weights, biases, group_offsets))
    return result


def _fused(plan: Plan, save: bool, activation: str, precision, *operands) -> tuple[jax.Array, Halves]:
    """h and, with save, the pre-activations, by one kernel."""
    assert plan.fused is not None  # make_plan fills it
    how: dict[str, Any] = {"activation": activation, "save": save}
    if isinstance(plan.fused, FusedTiles):
        from jaxops.ops.grouped_glu.fwd_triton import fwd_triton  # jax-triton is imported only where it is called

        kernel = functools.partial(fwd_triton, **how, **vars(plan.fused), cores=plan.on.cores)
        h, *pre = sequential_vmap(kernel)(*operands)  # a call through jax-triton has no batching rule
    else:
        how |= {"tiles": plan.fused, "precision": precision, "interpret": plan.on.interpret}
        h, *pre = fwd_pallas(*operands, **how)
    return h, tuple(pre)


def _preactivations(spec: Spec, x: jax.Array, weights: Halves, biases: Biases, offsets: jax.Array) -> Halves:
    product = functools.partial(grouped_matmul, precision=spec.precision, plan=spec.plan.products)
    return tuple(product(x, w, offsets, bias=bias) for w, bias in zip(weights, biases, strict=True))


def _glu_forward(spec: Spec, keep: bool, x: jax.Array, weights: Halves, biases: Biases, offsets: jax.Array) -> Any:
    """(h, the pre-activations if keep, else ())."""
    two = len(weights) == 2  # of one weight the columns of gate and of up would be on other devices
    axes, results = ("m.", "..n" if two else "...", ".n" if two else "..", "#"), "mn" if two else "m."
    call = functools.partial(_glu_of_part, spec, keep)
    return partitioned(call, (x, weights, biases, offsets), axes, results, split="mn")


def _glu_of_part(spec: Spec, keep: bool, _: Part, x: jax.Array, weights: Halves, biases: Biases, offsets) -> Any:
    x, weights = x.astype(spec.compute_dtype), tuple(w.astype(spec.compute_dtype) for w in weights)
    if spec.plan.fused is not None and 0 not in (*x.shape, *weights[0].shape):
        bias = biases_of_units(biases, weights)
        return _fused(spec.plan, keep, spec.activation, spec.precision, x, weights, bias, offsets)
    pre = _preactivations(spec, x, weights, biases, offsets)
    return unit_forward(spec, pre, offsets), pre if keep else ()


def unit_forward(spec: Spec, pre: Halves, offsets: jax.Array) -> jax.Array:
    """h of the pre-activations."""
    if spec.plan.fwd is None or 0 in pre[0].shape:
        return fwd_xla(spec, pre, offsets)
    return unit_fwd_pallas(spec, spec.plan.fwd, pre, offsets, interpret=spec.plan.on.interpret)


def _glu_fwd(spec: Spec, keep: bool, x: jax.Array, weights: Halves, biases: Biases, offsets: jax.Array):
    # As in grouped_matmul: the casts are kept, and the call goes through the custom_vjp so that this rule has a
    # gradient.
    x = named_cast(x, spec.compute_dtype, "grouped_glu.x")
    weights = tuple(w.astype(spec.compute_dtype) for w in weights)
    inner = dataclasses.replace(spec, x_dtype=spec.compute_dtype, w_dtype=spec.compute_dtype)
    result: Any = _glu(inner, keep or spec.save, x, weights, biases, offsets)
    h, pre = checkpoint_name(result[0], "grouped_glu.out"), result[1]
    names = ("gate_up",) if len(weights) == 1 else ("gate", "up")
    pre = tuple(checkpoint_name(half, f"grouped_glu.{name}") for half, name in zip(pre, names, strict=bool(pre)))
    return (h, pre if keep else ()), (x, weights, biases, pre if spec.save else (), offsets)


def _glu_bwd(spec: Spec, keep: bool, residuals, cotangents):
    x, weights, biases, pre, offsets = residuals
    dh, dkept = cotangents
    if not pre:
        # Only after dh exists: otherwise XLA may merge this product with the forward's and keep its result.
        x, dh = lax.optimization_barrier((x, dh))
        pre = _preactivations(spec, x, weights, biases, offsets)
    dpre: Any = _unit_gradients(spec, pre, dh, offsets)
    if dkept:  # a second derivative's
        dpre = tuple(a + b for a, b in zip(dpre, dkept, strict=True))
    products, precision = spec.plan.products, spec.precision
    assert products is not None  # make_plan fills it
    how: dict[str, Any] = {"transpose_rhs": True, "precision": precision, "out_dtype": spec.x_dtype}
    dx = grouped_matmul_sum(dpre, weights, offsets, plan=products.swapped, **how)
    wgrad = functools.partial(grouped_wgrad, precision=precision, out_dtype=spec.w_dtype, plan=products)
    dbiases = tuple(
        None if bias is None else sums_of_groups(d, offsets, plan=products, out_dtype=bias.dtype)
        for d, bias in zip(dpre, biases, strict=True)
    )
    return dx, tuple(wgrad(x, d, offsets) for d in dpre), dbiases, None


_glu = differentiable(_glu_forward, _glu_fwd, _glu_bwd, static=2)


def unit_backward(spec: Spec, pre: Halves, dh: jax.Array, offsets: jax.Array) -> Any:
    """The pre-activations' gradients."""
    if spec.plan.bwd is None or 0 in dh.shape:
        return bwd_xla(spec, pre, dh, offsets)
    return unit_bwd_pallas(spec, spec.plan.bwd, pre, dh, offsets, interpret=spec.plan.on.interpret)


def _unit_backward(spec: Spec, pre: Halves, dh: jax.Array, offsets: jax.Array) -> Any:
    axes = ("mn", "mn", "#") if len(pre) == 2 else ("m.", "m.", "#")
    call = lambda part, *operands: unit_backward(spec, *operands)
    return partitioned(call, (pre, dh, offsets), axes, axes[0], split="mn")


_unit_gradients = differentiable_as(_unit_backward, bwd_xla, static=1)
