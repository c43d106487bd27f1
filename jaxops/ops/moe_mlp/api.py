"""The public function: checks, then the custom_vjp that keeps little and fuses what lies between the backward's products."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap

from jaxops._lib.activations import ACTIVATIONS
from jaxops._lib.checks import check_choice, check_float, check_size, compute_dtype_of, float_dtype
from jaxops._lib.device import device_of
from jaxops._lib.differentiable import differentiable
from jaxops._lib.manual_axes import vary_together
from jaxops._lib.precision import named_cast, resolve_precision
from jaxops._lib.tuned import tuned_rows
from jaxops.ops.grouped_glu import SAVES, glu_of_rows
from jaxops.ops.grouped_matmul import grouped_matmul, grouped_matmul_sum, grouped_wgrad
from jaxops.ops.moe_mlp.plan import Plan, Problem, Spec, make_plan
from jaxops.ops.moe_mlp.xla import of_choices, unit_bwd_xla, weights_of_rows
from jaxops.ops.permute import check_routing, combine, permute
from jaxops.ops.route import Routing

Experts = tuple[jax.Array, jax.Array, jax.Array]  # the weights of gate, up and down
Fields = tuple[
    jax.Array, ...
]  # of a Routing: JAX fills the trees that a custom_vjp takes with what is no array, which type checkers refuse to see in one


def moe_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    routing: Routing,
    *,
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid"] = "silu",
    compute_dtype=None,
    out_dtype=None,
    precision: lax.PrecisionLike = None,
    save: Literal["preactivations", "nothing"] = "preactivations",
    backend: str = "auto",
    plan: Plan | None = None,
) -> jax.Array:
    """The experts of a mixture-of-experts layer: `out[t] = sum_j weights[t, j] * (act(x[t] @ w_gate[e]) * (x[t] @ w_up[e])) @ w_down[e]`, e token t's choice j.

    What `jaxops.permute`, `grouped_glu`, `grouped_matmul` and `combine` give one after another, in less memory and time: between forward and backward only gate
    and up are kept, no copy of rows; the router weights' gradient comes out of the product that the backward needs anyway, in the same kernel (on Hopper) as
    the activation's; the gradient of x is one product over both weights. Differentiable (reverse mode, any order) in x, all weights, and routing.weights, and
    through these in the router's logits. Deterministic. Rows of `routing` outside all groups contribute nothing, so a device that holds some of the experts
    passes a Routing with its slice of the offsets, and adds the results over the devices.

    >>> import jax.numpy as jnp, jaxops
    >>> routing = jaxops.route(jnp.array([[9., 0.], [0., 9.], [0., 0.]]), 1)  # to experts 0, 1 and 0
    >>> one = jnp.ones((2, 1, 1))
    >>> jaxops.moe_mlp(jnp.array([[1.], [2.], [3.]]), one, one, jnp.array([[[1.]], [[10.]]]), routing, activation="relu")
    Array([[ 1.],
           [40.],
           [ 9.]], dtype=float32)

    Args:
      x: [T, D], bfloat16, float16 or float32.
      w_gate, w_up: [E, D, F]; dtype of x unless compute_dtype is given.
      w_down: [E, F, N], dtype of w_gate.
      routing: of the T tokens to E experts, from `jaxops.route`.
      activation: as in `jaxops.grouped_glu`.
      compute_dtype: dtype to which x and the weights are cast inside. Float32 weights keep float32 gradients, which are never rounded to compute_dtype.
      out_dtype: bfloat16, float16 or float32; dtype of x by default.
      precision: of float32 products, as in `jaxops.grouped_matmul`.
      save: "preactivations" keeps gate and up [T * k, F] for the backward; "nothing" multiplies again there.
      backend: "auto" takes the kernels on a GPU and plain XLA on CPU and TPU; "triton" (on Hopper), "pallas" (interpreted on a CPU) or "xla" runs or raises.
      plan: a `Plan`, instead of the one made of the ops' own.

    Returns:
      [T, N] in out_dtype.

    Raises:
      ValueError: shapes that do not fit together, an unknown activation, save or backend.
      TypeError: dtypes that the kernels do not multiply, dtypes that differ without compute_dtype, a routing that is no `Routing`; forward-mode
        differentiation (JAX's own error).
      NotImplementedError: a precision algorithm that the kernels do not have.

    Residuals: named "moe_mlp.x", "moe_mlp.gate", "moe_mlp.up", "moe_mlp.out" (checkpoint names; x: its cast).

    Source: the experts of Mixtral (Jiang et al. 2024, arXiv:2401.04088) over the grouped products of MegaBlocks (Gale et al. 2022, arXiv:2211.15841); that the
      router weights' gradient needs no output of the down projection is SonicMoE's (Guo et al. 2025, arXiv:2512.14080).
    """
    check_float("x", x, "[T, D]")
    check_float("w_gate", w_gate, "[E, D, F]")
    check_float("w_up", w_up, "[E, D, F]")
    check_float("w_down", w_down, "[E, F, N]")
    E, D, F = w_gate.shape
    check_size("D of x (its columns)", x.shape[1], f"D of w_gate {tuple(w_gate.shape)}", D)
    if w_up.shape != w_gate.shape:
        raise ValueError(f"w_up has shape {tuple(w_up.shape)}; it must be that of w_gate, {tuple(w_gate.shape)}.")
    if w_down.shape[:2] != (E, F):
        raise ValueError(
            f"w_down has shape {tuple(w_down.shape)}; it must be [E, F, N] with E, F = {E}, {F}, as w_gate is {tuple(w_gate.shape)}."
        )
    for name, w in (("w_up", w_up), ("w_down", w_down)):
        if w.dtype != w_gate.dtype:
            raise TypeError(f"{name} is {w.dtype} and w_gate is {w_gate.dtype}: cast one of them.")
    T, k = check_routing(routing).positions.shape
    check_size(
        "len(routing.group_offsets)",
        routing.group_offsets.shape[0],
        "w_gate.shape[0] + 1 (E experts have E + 1 offsets)",
        E + 1,
    )
    check_size("x's number of rows", x.shape[0], "T of routing.row_positions", T)
    compute = compute_dtype_of("x", x, "w_gate", w_gate, compute_dtype, "the weights' gradients stay")
    precision, compute = resolve_precision(precision, compute)
    out = float_dtype("out_dtype", x.dtype if out_dtype is None else out_dtype)
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("save", save, SAVES)
    device = device_of(x, w_gate, routing)
    problem = Problem(T, k, E, D, F, w_down.shape[2], compute.name)
    plan = make_plan(problem, device, tuned_rows("grouped_matmul", device), backend=backend, plan=plan)
    x, w_gate, w_up, w_down, *fields = vary_together(
        x, w_gate, w_up, w_down, *(getattr(routing, name) for name in _READ)
    )
    routing = dataclasses.replace(routing, **dict(zip(_READ, fields, strict=True)))
    spec = Spec(plan, activation, save, precision, compute, out)
    return _mlp(
        spec,
        x,
        routing.weights,
        (w_gate, w_up, w_down),
        tuple(getattr(routing, field.name) for field in dataclasses.fields(Routing)),
    )


_READ = ("weights", "row_positions", "row_indices", "group_offsets")  # of a Routing


def _copied_up(
    spec: Spec, save: bool, x: jax.Array, experts: Experts, routing: Routing
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    assert spec.plan.unit is not None  # make_plan fills it
    how: dict[str, Any] = {
        "activation": spec.activation,
        "precision": spec.precision,
        "plan": spec.plan.unit,
        "save": save,
    }
    return glu_of_rows(permute(x, routing, plan=spec.plan.rows), experts[:2], routing.group_offsets, **how)


def _up_forward(spec: Spec, save: bool, x: jax.Array, experts: Experts, fields: Fields) -> Any:
    """(h, with save gate and up) of the rows, from operands in the compute dtype."""
    routing = Routing(*fields)
    if not spec.plan.gather or 0 in (*x.shape, *routing.row_indices.shape, *experts[0].shape):
        return _copied_up(spec, save, x, experts, routing)
    assert spec.plan.unit is not None
    how: dict[str, Any] = {
        "activation": spec.activation,
        "precision": spec.precision,
        "plan": spec.plan.unit,
        "save": save,
    }
    return glu_of_rows(x, experts[:2], routing.group_offsets, routing.row_indices, **how)


def _up_fwd(spec: Spec, save: bool, x: jax.Array, experts: Experts, fields: Fields):
    return _up(spec, save, x, experts, fields), (x, experts, fields)


def _up_bwd(spec: Spec, save: bool, operands, cotangents):
    x, experts, fields = operands
    _, vjp = jax.vjp(lambda x, experts: _copied_up(spec, save, x, experts, Routing(*fields)), x, experts)
    return *vjp(cotangents), None


_up = differentiable(_up_forward, _up_fwd, _up_bwd, static=2)


def _down(spec: Spec, h: jax.Array, weights: jax.Array, w_down: jax.Array, routing: Routing) -> jax.Array:
    y = grouped_matmul(h, w_down, routing.group_offsets, precision=spec.precision, plan=spec.plan.down)
    return combine(y, dataclasses.replace(routing, weights=weights), out_dtype=spec.out_dtype, plan=spec.plan.rows)


def _cast(spec: Spec, x: jax.Array, experts: Experts) -> tuple[jax.Array, Experts]:
    gate, up, down = (w.astype(spec.compute_dtype) for w in experts)
    return x.astype(spec.compute_dtype), (gate, up, down)


def _mlp_forward(spec: Spec, x: jax.Array, weights: jax.Array, experts: Experts, fields: Fields) -> Any:
    """weights: the router's, instead of the routing's own."""
    x, experts = _cast(spec, x, experts)
    found: Any = _up(spec, False, x, experts, fields)
    return _down(spec, found[0], weights, experts[2], Routing(*fields))


def _mlp_fwd(spec: Spec, x: jax.Array, weights: jax.Array, experts: Experts, fields: Fields):
    kinds = tuple(jnp.zeros(0, a.dtype) for a in (x, experts[0]))  # dtypes: all that the backward needs of the operands
    x, experts = _cast(spec, named_cast(x, spec.compute_dtype, "moe_mlp.x"), experts)
    found: Any = _up(spec, spec.save == "preactivations", x, experts, fields)
    h, pre = found
    pre = tuple(checkpoint_name(half, f"moe_mlp.{name}") for half, name in zip(pre, ("gate", "up"), strict=bool(pre)))
    return checkpoint_name(_down(spec, h, weights, experts[2], Routing(*fields)), "moe_mlp.out"), (
        x,
        weights,
        experts,
        pre,
        fields,
        kinds,
    )


def _mlp_bwd(spec: Spec, residuals, dout: jax.Array):
    x, weights, experts, pre, fields, (x_kind, w_kind) = residuals
    # After dout is there: otherwise XLA may find that the forward has copied these rows, or multiplied them, and keep that.
    x, dout = lax.optimization_barrier((x, dout))
    found: Any = _gradients(spec, w_kind.dtype, x, weights, experts, pre, dout, fields)
    dx, dweights, dexperts = found
    return dx.astype(x_kind.dtype), dweights, dexperts, None


_mlp = differentiable(_mlp_forward, _mlp_fwd, _mlp_bwd, static=1)


def _gradients_forward(
    spec: Spec, w_dtype, x: jax.Array, weights: jax.Array, experts: Experts, pre, dout: jax.Array, fields: Fields
) -> Any:
    """Of x, in the compute dtype, of the router's weights, and of the experts', in w_dtype."""
    routing = Routing(*fields)
    unit, down, offsets = spec.plan.unit, spec.plan.down, routing.group_offsets
    assert down is not None
    assert unit is not None
    assert unit.products is not None  # make_plan fills them
    found: Any = (None, pre) if pre else _up(spec, True, x, experts, fields)
    gate, up = found[1]
    dy = permute(dout.astype(spec.compute_dtype), routing, plan=spec.plan.rows)
    dgate, dup, h, dots = _through_down(spec, dy, experts[2], gate, up, dataclasses.replace(routing, weights=weights))
    dw_down = grouped_wgrad(h, dy, offsets, precision=spec.precision, out_dtype=w_dtype, plan=down)
    back = dataclasses.replace(unit.products, fwd=unit.products.dgrad, dgrad=unit.products.fwd)
    _, to_tokens = jax.vjp(lambda x: permute(x, routing, plan=spec.plan.rows), x)
    (dx,) = to_tokens(
        grouped_matmul_sum((dgate, dup), experts[:2], offsets, plan=back, transpose_rhs=True, precision=spec.precision)
    )
    _, _, x = lax.optimization_barrier(
        (dw_down, dx, x)
    )  # x's rows are made when dy's and those of its gradient are gone
    rows = permute(x, routing, plan=spec.plan.rows)
    dw_gate, dw_up = (
        grouped_wgrad(rows, d, offsets, precision=spec.precision, out_dtype=w_dtype, plan=unit.products)
        for d in (dgate, dup)
    )
    return dx, of_choices(dots, routing), (dw_gate, dw_up, dw_down)


def _through_down(
    spec: Spec, dy: jax.Array, w_down: jax.Array, gate: jax.Array, up: jax.Array, routing: Routing
) -> tuple[jax.Array, ...]:
    """As `unit_bwd_xla`, from the cotangents of the down projection's rows before the router's weights."""
    offsets, of_rows, down, fused = routing.group_offsets, weights_of_rows(routing), spec.plan.down, spec.plan.fused
    if fused is not None and 0 not in (*dy.shape, *w_down.shape):
        from jaxops.ops.moe_mlp.bwd_triton import bwd_triton  # jax-triton is imported only where it is called

        kernel = functools.partial(
            bwd_triton, activation=spec.activation, panel=fused.panel, dynamic=fused.dynamic, cores=spec.plan.on.cores
        )
        return sequential_vmap(kernel)(
            dy, w_down, gate, up, of_rows, offsets
        )  # a call through jax-triton has no batching rule
    assert down is not None  # make_plan fills it
    back = dataclasses.replace(down, fwd=down.dgrad, dgrad=down.fwd)
    dh = grouped_matmul(dy, w_down, offsets, transpose_rhs=True, precision=spec.precision, plan=back)
    return unit_bwd_xla(spec.activation, dh, gate, up, of_rows)


def _gradients_fwd(spec: Spec, w_dtype, x, weights, experts, pre, dout, fields):
    return _gradients(spec, w_dtype, x, weights, experts, pre, dout, fields), (x, weights, experts, pre, dout, fields)


def _gradients_bwd(spec: Spec, w_dtype, operands, cotangents):
    """Second derivatives are JAX's own, of the ops that the forward is made of. All of pre's part in them is x's and the experts'."""
    x, weights, experts, pre, dout, fields = operands
    routing = Routing(*fields)

    def gradients(x, weights, experts, dout):
        def forward(x, weights, experts):
            h, _ = _copied_up(spec, False, x, experts, routing)
            return _down(spec, h, weights, experts[2], routing)

        _, vjp = jax.vjp(forward, x, weights, experts)
        dx, dweights, dexperts = vjp(dout)
        return dx, dweights, tuple(d.astype(w_dtype) for d in dexperts)

    _, vjp = jax.vjp(gradients, x, weights, experts, dout)
    dx, dweights, dexperts, ddout = vjp(cotangents)
    return dx, dweights, dexperts, jax.tree.map(jnp.zeros_like, pre), ddout, None


_gradients = differentiable(_gradients_forward, _gradients_fwd, _gradients_bwd, static=2)
