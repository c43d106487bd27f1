"""The public function: checks, then a custom_vjp with few residuals and fused elementwise work in the backward."""

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
    check_flag,
    check_float,
    check_size,
    compute_dtype_of,
    float_dtype,
    type_name,
)
from jaxops._lib.arrays.differentiable import differentiable, differentiable_as
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.partitioning import WHOLE, Part, warn_if_split
from jaxops._lib.arrays.precision import named_cast, resolve_precision
from jaxops._lib.numerics.activations import UnitActivation, activation_name
from jaxops._lib.numerics.fp8 import Quantized
from jaxops._lib.planning.device import device_of
from jaxops._lib.planning.tuned import tuned_rows
from jaxops.ops.fp8_matmul import check_grouped_recipe, shape_of
from jaxops.ops.grouped_glu import SAVES, Biases, check_biases, glu_of_rows
from jaxops.ops.grouped_matmul import grouped_matmul, grouped_matmul_sum, grouped_wgrad, sums_of_groups
from jaxops.ops.moe_mlp import fp8
from jaxops.ops.moe_mlp.of_tokens import backward_of_tokens, forward_of_tokens
from jaxops.ops.moe_mlp.plan import Plan, Problem, Spec, make_plan
from jaxops.ops.moe_mlp.stored import mlp_stored
from jaxops.ops.moe_mlp.xla import products_with_bias, sums_of_choices, unit_bwd_xla, unit_xla, weights_of_rows
from jaxops.ops.permute import check_routing, combine, permute, permute_within_groups
from jaxops.ops.route import Routing, partial_routing

Experts = tuple[jax.Array, ...]  # the weights of gate, up and down; or of both in one and down; or of up and down


def moe_mlp(
    x: jax.Array, w_gate: jax.Array | Quantized | None, w_up: jax.Array | Quantized | None,
    w_down: jax.Array | Quantized, routing: Routing, *,
    biases: tuple[jax.Array | None, jax.Array | None, jax.Array | None] | None = None,
    activation: UnitActivation = "silu",
    compute_dtype=None, out_dtype=None, precision: lax.PrecisionLike = None,
    save: Literal["preactivations", "nothing"] = "preactivations", recipe: str | None = None,
    pow2_scales: bool = False, backend: str = "auto", plan: Plan | None = None,
) -> jax.Array:  # fmt: skip
    """The experts of a mixture-of-experts layer, from tokens to tokens: with e the expert of token t's choice j,
    `out[t] = sum_j weights[t, j] * (act(x[t] @ w_gate[e]) * (x[t] @ w_up[e])) @ w_down[e]`.

    w_gate and w_up may be one array, and w_gate may be left out: then an expert is `act(x @ w_up[e]) @ w_down[e]`. Each
    of the three products may have a bias, added before the activation and before the router's weight.

    The same as `jaxops.permute`, `grouped_glu`, `grouped_matmul` and `combine` one after another, in less memory and
    time. The residuals are gate and up, without a copy of rows. The gradient of the router's weights needs no output of
    the down projection; on Hopper one kernel computes it, the activation's gradient and that of the down projection's
    rows. The gradient of x is one product over both weights. Differentiable (reverse mode, any order) in x, weights,
    biases and routing.weights. Deterministic. Rows of `routing` outside all groups contribute nothing, so a device that
    holds some of the experts passes a Routing with its slice of the offsets, and the results are summed over the
    devices.

    With an FP8 `recipe` all products are in FP8 as those of `jaxops.fp8_grouped_matmul`, with gate and up as one matrix
    [E, D, 2 F]: tokens are cast once, then copied to their experts' rows or gathered by the first product; the
    activation and its backward cast what they compute; gate and up, or their gradients, share scales as one matrix has
    them. Weights wider than compute_dtype are rounded to it before their cast. Differentiable once.

    With `Quantized` weights, which a checkpoint has in FP8, neither x nor the values between the products are cast to
    FP8: for a few tokens, as in decoding, where reading the weights takes the time. Differentiable once, in x and
    routing.weights.

    >>> import jax.numpy as jnp, jaxops
    >>> routing = jaxops.route(jnp.array([[9., 0.], [0., 9.], [0., 0.]]), 1)  # to experts 0, 1 and 0
    >>> x, one, w_down = jnp.array([[1.], [2.], [3.]]), jnp.ones((2, 1, 1)), jnp.array([[[1.]], [[10.]]])
    >>> jaxops.moe_mlp(x, one, one, w_down, routing, activation="relu")[:, 0]
    Array([ 1., 40.,  9.], dtype=float32)

    Gate and up in one array, a bias of the down projection, and experts without a gate:

    >>> joined, bias = jnp.concatenate([one, one], axis=2), jnp.array([[0.5], [0.]])
    >>> jaxops.moe_mlp(x, joined, None, w_down, routing, activation="relu", biases=(None, None, bias))[:, 0]
    Array([ 1.5, 40. ,  9.5], dtype=float32)
    >>> jaxops.moe_mlp(x, None, one, w_down, routing, activation="relu2")[:, 0]
    Array([ 1., 40.,  9.], dtype=float32)

    Args:
      x: [T, D], bfloat16, float16 or float32.
      w_gate, w_up: [E, D, F]; dtype of x unless compute_dtype is given. Or w_up is None and w_gate [E, D, 2 F],
        gate's columns before up's; or w_gate is None. Or all three weights are `Quantized` with 128x128 scales, by
        `Quantized.from_deepseek`.
      w_down: [E, F, N], dtype of w_gate.
      routing: of the T tokens to E experts, from `jaxops.route`.
      biases: None, or one for each of w_gate, w_up and w_down (or None): [E, its columns], of any of the dtypes, added
        in float32. With one array of weights `([E, 2 F], None, [E, N])`. Their gradients are summed in float32.
      activation: as in `jaxops.grouped_glu`; "swiglu_oai" needs a gate.
      compute_dtype: dtype to which x and the weights are cast inside. Gradients of float32 weights stay float32 and are
        never rounded to compute_dtype.
      out_dtype: bfloat16, float16 or float32; dtype of x by default.
      precision: of float32 products, as in `jaxops.grouped_matmul`.
      save: "preactivations" keeps gate and up [T * k, F] for the backward, with a recipe also the weights in FP8;
        "nothing" recomputes them there, and so does a program over several devices that XLA splits by tokens.
      recipe: None, or an FP8 recipe of `jaxops.fp8_grouped_matmul`; None with `Quantized` weights. With a recipe or
        `Quantized` weights, x and the weights may differ in dtype, and compute_dtype (x's by default) is that of the
        values between the products.
      pow2_scales: whether FP8 scales are rounded up to powers of two.
      backend: "auto" takes the kernels on a GPU, XLA on CPU and TPU; "triton" (on Hopper), "pallas" (interpreted on a
        CPU) or "xla" runs or raises.
      plan: a `Plan`, instead of the one made of the ops' own plans.

    Returns:
      [T, N] in out_dtype.

    Raises:
      ValueError: shapes that do not fit together, an unknown activation, save, recipe or backend; precision with a
        recipe, pow2_scales without one; `Quantized` weights with a recipe, a precision or other scales; "swiglu_oai"
        without a gate.
      TypeError: dtypes that the kernels do not multiply, dtypes that differ without compute_dtype, only some weights
        `Quantized`, biases that are no tuple, a routing that is not a `Routing`; forward-mode differentiation (JAX's
        own error).
      NotImplementedError: a precision algorithm that the kernels do not have; in FP8 biases, one array for gate and up,
        "swiglu_oai", experts without a gate, a GPU without FP8, and with `Quantized` weights backend "triton".

    Residuals: "moe_mlp.x" (its cast), "moe_mlp.gate", "moe_mlp.up" or "moe_mlp.gate_up" of one array, "moe_mlp.out";
    with a recipe "moe_mlp.gate_up", "moe_mlp.w_gate_up" and "moe_mlp.w_down" instead of gate and up (checkpoint names).

    Source: the experts of Mixtral (Jiang et al. 2024, arXiv:2401.04088) over MegaBlocks' grouped products (Gale et al.
    2022, arXiv:2211.15841); the gradient of the router's weights is SonicMoE's (Guo et al. 2025, arXiv:2512.14080).
    """
    given = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    shape = _check_weights(given)
    experts, form = tuple(w for w in given.values() if w is not None), _form(w_gate, w_up)
    stored = isinstance(w_down, Quantized)
    routing = _check_tokens(x, routing, shape)
    out = float_dtype("out_dtype", x.dtype if out_dtype is None else out_dtype)
    act: str = activation_name(activation, unit=True)
    if act == "swiglu_oai" and form == "alone":
        raise ValueError("activation='swiglu_oai' is a unit of gate and up, and w_gate is None: pass w_gate.")
    check_choice("save", save, SAVES)
    T, k = routing.row_positions.shape
    sizes = (T, k, *shape)
    device = device_of(x, w_down, routing)
    if check_flag("pow2_scales", pow2_scales) and recipe is None:
        raise ValueError("pow2_scales=True needs an FP8 recipe, such as recipe='blockwise'.")
    if stored and recipe is not None:
        raise ValueError(f"recipe={recipe!r}: with Quantized weights x is not quantized; leave recipe out.")
    w_dtype = jnp.dtype(w_down.dtype)
    if stored or recipe is not None:
        if precision is not None:
            sets = "Quantized weights set" if stored else f"recipe={recipe!r} sets"
            raise ValueError(f"precision is {precision!r}; it must be None: {sets} the precision.")
        _check_fp8("Quantized weights have" if stored else f"recipe={recipe!r} has", form, act, biases)
        fp8_recipe = check_grouped_recipe("blockwise" if stored else recipe)
        fp8_recipe = fp8_recipe.with_pow2_scales() if pow2_scales else fp8_recipe
        compute = float_dtype("compute_dtype", x.dtype if compute_dtype is None else compute_dtype)
        rows = tuned_rows("fp8_matmul", device, "permute")
        plan = make_plan(
            Problem(*sizes, compute.name, fp8_recipe.name, stored), device, rows, backend=backend, plan=plan
        )
        spec = fp8.Fp8Spec(plan, act, save, compute, out, x.dtype, w_dtype, recipe=fp8_recipe)
        run = mlp_stored if stored else fp8.mlp_fp8
        if plan.backend != "xla":
            (x,) = warn_if_split("moe_mlp in FP8", x)
        if 0 in sizes:
            return jnp.zeros((T, shape[-1]), out)
        return run(spec, *vary_together(x, experts, routing))
    first = "w_up" if w_gate is None else "w_gate"
    compute = compute_dtype_of("x", x, first, experts[0], compute_dtype, "the weights' gradients stay")
    precision, compute = resolve_precision(precision, compute)
    rows = tuned_rows("grouped_matmul", device, "grouped_glu", "permute")
    plan = make_plan(Problem(*sizes, compute.name, form=form), device, rows, backend=backend, plan=plan)
    spec = Spec(plan, act, save, compute, out, x.dtype, w_dtype, precision, form)
    return _mlp(spec, *vary_together(x, experts, check_biases(biases, given), routing))


def _form(w_gate: Any, w_up: Any) -> Any:
    """`Problem.form`."""
    return "alone" if w_gate is None else "joined" if w_up is None else "two"


def _check_fp8(what: str, form: str, activation: str, biases: Any) -> None:
    """what: of FP8, and "has"."""
    if biases is not None:
        raise NotImplementedError(f"{what} no biases: leave recipe out, or add them between fp8_grouped_matmul.")
    if form != "two":
        write = "w_gate[..., :F], w_gate[..., F:]" if form == "joined" else "w_gate and w_up"
        raise NotImplementedError(f"{what} kernels for gate and up as two arrays only: pass {write}.")
    if activation == "swiglu_oai":
        raise NotImplementedError(f"{what} no unit 'swiglu_oai': leave recipe out, or write it between products.")


def _check_tokens(x: jax.Array, routing: Any, shape: tuple[int, ...]) -> Routing:
    """The parts of the routing that the op reads, checked against x and the weights' E, D, F, N."""
    E, D, F, _ = shape
    check_float("x", x, "[T, D]")
    check_size("D of x (its columns)", x.shape[1], f"D of w_gate {(E, D, F)}", D)
    own = check_routing(routing)
    offsets = own.group_offsets.shape[0]
    check_size("len(routing.group_offsets)", offsets, "w_gate.shape[0] + 1 (E experts have E + 1 offsets)", E + 1)
    check_size("x's number of rows", x.shape[0], "T of routing.row_positions", own.row_positions.shape[0])
    return own


def _check_weights(given: dict[str, Any]) -> tuple[int, int, int, int]:
    """E, D, F, N of the weights by name: float arrays of one dtype, or all three Quantized."""
    if given["w_gate"] is None and given["w_up"] is None:
        raise ValueError("w_gate and w_up are None; pass both, or w_up alone, or w_gate as [E, D, 2 F].")
    form = _form(given["w_gate"], given["w_up"])
    shapes = {"w_gate": "[E, D, 2 F]" if form == "joined" else "[E, D, F]", "w_up": "[E, D, F]", "w_down": "[E, F, N]"}
    stored = [isinstance(w, Quantized) for w in given.values()]
    if any(stored) and not all(stored):
        got = ", ".join(f"{name} is {type_name(w)}" for name, w in given.items())
        raise TypeError(f"{got}: pass three arrays, or three Quantized.")
    weights = {name: w for name, w in given.items() if w is not None}
    for name, w in weights.items():
        if not any(stored):
            check_float(name, w, shapes[name])
        elif w.values is None and w.values_t is None:
            raise ValueError(f"{name} has neither a row nor a column layout.")
        elif w.scaling != "block_128x128" or len(shape_of(w)) != 3:
            got = f"{name} has {w.scaling} scales and shape {tuple(shape_of(w))}"
            raise ValueError(
                f"{got}; it must be {shapes[name]} with block_128x128 scales, as of Quantized.from_deepseek."
            )
    first, *others = weights
    sizes = {name: tuple(shape_of(w)) for name, w in weights.items()}
    E, D, F = sizes[first]
    if form == "joined":
        if F % 2:
            raise ValueError(f"w_gate has shape {sizes[first]}; without w_up it must be [E, D, 2 F], an even number.")
        F //= 2
    if form == "two" and sizes["w_up"] != sizes[first]:
        raise ValueError(f"w_up has shape {sizes['w_up']}; it must be that of w_gate, {sizes[first]}.")
    if sizes["w_down"][:2] != (E, F):
        said = "w_gate, [E, D, 2 F] without w_up," if form == "joined" else first
        needed = f"[E, F, N] with E, F = {E}, {F}, as {said} is {sizes[first]}"
        raise ValueError(f"w_down has shape {sizes['w_down']}; it must be {needed}.")
    for name in others:
        if not any(stored) and weights[name].dtype != weights[first].dtype:
            raise TypeError(f"{name} is {weights[name].dtype} and {first} is {weights[first].dtype}: cast one of them.")
    return E, D, F, sizes["w_down"][2]


def _up_forward(spec: Spec, save: bool, x: jax.Array, experts: Experts, biases: Biases, routing: Routing) -> Any:
    """(h, and with save the pre-activations) of the rows, from operands in the compute dtype."""
    unit, gather, indices = spec.plan.unit, spec.plan.gather, routing.row_indices
    assert unit is not None  # make_plan fills it
    if not gather or 0 in (*x.shape, *indices.shape, *experts[0].shape):
        x, indices = permute(x, routing, plan=spec.plan.rows), None
    options: dict[str, Any] = {"precision": spec.precision, "plan": unit}
    if spec.form == "alone":
        pre = grouped_matmul(x, experts[0], routing.group_offsets, bias=biases[0], **options)
        return unit_xla(spec.activation, pre), (pre,) if save else ()
    options |= {"activation": spec.activation, "save": save}
    return glu_of_rows(x, experts[:-1], biases[:-1], routing.group_offsets, indices, **options)


def _up_plain(spec: Spec, *operands) -> Any:
    """From a copy of the rows: gathered rows have no gradient."""
    return _up_forward(dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, gather=False)), *operands)


_up = differentiable_as(_up_forward, _up_plain, static=2)


def _down(spec: Spec, h: jax.Array, w_down: jax.Array, bias: jax.Array | None, routing: Routing) -> jax.Array:
    options: dict[str, Any] = {"precision": spec.precision, "plan": spec.plan.down}
    y = grouped_matmul(h, w_down, routing.group_offsets, bias=bias, **options)
    return combine(y, routing, out_dtype=spec.out_dtype, plan=spec.plan.rows)


_SAVED = {"two": ("gate", "up"), "joined": ("gate_up",), "alone": ("up",)}


def _fwd(spec: Spec, x: jax.Array, experts: Experts, biases: Biases, routing: Routing):
    x = named_cast(x, spec.compute_dtype, "moe_mlp.x")
    y, pre = _layer(spec, spec.save == "preactivations", x, _cast(spec, experts), biases, routing)
    named = zip(pre, _SAVED[spec.form], strict=bool(pre))
    pre = tuple(checkpoint_name(half, f"moe_mlp.{name}") for half, name in named)
    # The backward casts the weights again. In one program XLA makes one cast of both; a scan over layers would stack
    # what is cast, a second copy of all layers' weights, and has the float32 ones anyway.
    return checkpoint_name(y, "moe_mlp.out"), (x, experts, biases, pre, routing)


def _cast(spec: Spec, experts: Experts) -> Experts:
    return tuple(w.astype(spec.compute_dtype) for w in experts)


def _layer_of_part(
    spec: Spec, part: Part, save: bool, x: jax.Array, experts: Experts, biases: Biases, routing: Routing
) -> Any:
    """The result, and with save the pre-activations."""
    if part.first("f") is not None:  # a sum over devices is rounded once
        spec = dataclasses.replace(spec, out_dtype=jnp.dtype("float32"))
    h, pre = _up(spec, save, x, experts, biases, routing)
    return _down(spec, h, experts[-1], biases[-1], routing), pre


def _layer_forward(spec: Spec, *operands) -> Any:
    return forward_of_tokens(functools.partial(_layer_of_part, spec), spec.form, *operands)


_layer = differentiable_as(_layer_forward, lambda spec, *operands: _layer_of_part(spec, WHOLE, *operands), static=2)


def _forward(spec: Spec, *operands) -> Any:
    return _fwd(dataclasses.replace(spec, save="nothing"), *operands)[0]


def _bwd(spec: Spec, residuals, dout: jax.Array):
    x, experts, *others = residuals
    # Not before dout exists: XLA would share the rows' copy or the products with the forward, and keep them.
    x, dout = lax.optimization_barrier((x, dout))
    dx, dexperts, dbiases, dweights = _gradients(spec, x, _cast(spec, experts), *others, dout)
    return dx.astype(spec.x_dtype), dexperts, dbiases, partial_routing(weights=dweights)


_mlp = differentiable(_forward, _fwd, _bwd, static=1)


def _backward(
    spec: Spec, x: jax.Array, experts: Experts, biases: Biases, pre, routing: Routing, dout: jax.Array
) -> Any:  # fmt: skip
    """The gradients of x, in the compute dtype, of the experts' weights and biases, in their own, and of the router's
    weights."""
    call = functools.partial(_backward_of_part, spec)
    dx, dexperts, dbiases, dweights = backward_of_tokens(call, spec.form, x, experts, biases, pre, routing, dout)
    dbiases = jax.tree.map(lambda d, bias: d.astype(bias.dtype), dbiases, biases)
    return dx, tuple(d.astype(spec.w_dtype) for d in dexperts), dbiases, dweights


def _backward_of_part(
    spec: Spec, part: Part, x: jax.Array, experts: Experts, biases: Biases, pre, routing: Routing, dout: jax.Array
) -> Any:  # fmt: skip
    dtype = spec.w_dtype if part.first("m") is None else jnp.dtype("float32")  # sums over devices are rounded once
    unit, down, copies, offsets = spec.plan.unit, spec.plan.down, spec.plan.rows, routing.group_offsets
    products = unit if spec.form == "alone" else unit.products
    # make_plan fills them
    assert products is not None and down is not None and copies is not None  # noqa: PT018
    pre = pre or _up(spec, True, x, experts, biases, routing)[1]
    to_rows = functools.partial(permute_within_groups, routing=routing, plan=copies)
    dout = dout.astype(spec.compute_dtype)
    dy = to_rows(dout)
    *dpre, h, dots = _down_and_unit_bwd(spec, dy, experts[-1], pre, routing)
    dweights = sums_of_choices(dots, routing)
    of_groups = functools.partial(sums_of_groups, offsets=offsets, out_dtype=jnp.float32)
    dbiases = [None if b is None else of_groups(d, plan=products) for d, b in zip(dpre, biases[:-1], strict=True)]
    dbiases.append(None if biases[-1] is None else of_groups(dy, weights=weights_of_rows(routing), plan=down))
    if biases[-1] is not None:
        dweights += products_with_bias(dout, biases[-1], routing, spec.precision)
    wgrad = functools.partial(grouped_wgrad, group_offsets=offsets, precision=spec.precision, out_dtype=dtype)
    dw_down = wgrad(h, dy, plan=down)
    _, rows_to_tokens = jax.vjp(lambda x: permute(x, routing, plan=copies), x)
    options: dict[str, Any] = {"transpose_rhs": True, "precision": spec.precision, "plan": products.swapped}
    (dx,) = rows_to_tokens(grouped_matmul_sum(tuple(dpre), experts[:-1], offsets, **options))
    # Copy x's rows only after the last use of dy's rows and of the rows of x's gradient: less memory at the peak.
    _, _, x = lax.optimization_barrier((dw_down, dx, x))
    rows = to_rows(x)
    return dx, (*(wgrad(rows, d, plan=products) for d in dpre), dw_down), tuple(dbiases), dweights


def _down_and_unit_bwd(
    spec: Spec, dy: jax.Array, w_down: jax.Array, pre: Experts, routing: Routing
) -> tuple[jax.Array, ...]:
    """As `unit_bwd_xla`, from dy, the down projection's cotangent before the router's weights."""
    offsets, weights, down, fused = routing.group_offsets, weights_of_rows(routing), spec.plan.down, spec.plan.fused
    if fused is not None and 0 not in (*dy.shape, *w_down.shape):
        from jaxops.ops.moe_mlp.bwd_triton import bwd_triton  # jax-triton is imported only where it is called

        options = {"activation": spec.activation, "panel": fused.panel}
        kernel = functools.partial(bwd_triton, **options, cores=spec.plan.on.cores)
        # A call through jax-triton has no batching rule.
        return sequential_vmap(kernel)(dy, w_down, pre, weights, offsets)
    assert down is not None  # make_plan fills it
    dh = grouped_matmul(dy, w_down, offsets, transpose_rhs=True, precision=spec.precision, plan=down.swapped)
    return unit_bwd_xla(spec.activation, spec.form, dh, pre, weights)


def _plain_backward(
    spec: Spec, x: jax.Array, experts: Experts, biases: Biases, _, routing: Routing, dout: jax.Array
) -> Any:  # fmt: skip
    """Made of the forward's ops, which have gradients of any order. The pre-activations are recomputed."""

    def forward(x, experts, biases, weights):
        own = dataclasses.replace(routing, weights=weights)
        h, _ = _up_plain(spec, False, x, experts, biases, own)
        return _down(spec, h, experts[-1], biases[-1], own)

    _, vjp = jax.vjp(forward, x, experts, biases, routing.weights)
    dx, dexperts, dbiases, dweights = vjp(dout)
    return dx, tuple(d.astype(spec.w_dtype) for d in dexperts), dbiases, dweights


_gradients = differentiable_as(_backward, _plain_backward, static=1)
