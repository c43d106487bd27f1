"""The public functions: checks, then the custom_vjp that wires the passes together."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.arrays.checks import (
    check_array,
    check_choice,
    check_exact,
    check_flag,
    check_float,
    check_integer,
    check_number,
)
from jaxops._lib.arrays.differentiable import differentiable, differentiable_as
from jaxops._lib.arrays.symbolic import below, is_symbolic
from jaxops.ops.route.bwd_pallas import backward_pallas
from jaxops.ops.route.fwd_pallas import forward_pallas, sort_choices_pallas
from jaxops.ops.route.plan import PLANNER, SCORES, Plan, Problem, Spec
from jaxops.ops.route.routing import Routing, partial_routing
from jaxops.ops.route.xla import backward_xla, counted, forward_xla, losses, sort_choices

_MAX_ELEMENTS = 2**31  # of one array: row numbers, and offsets in a kernel, are int32


def route(
    logits: jax.Array, k: int, *, score: Literal["softmax", "sigmoid"] = "softmax", normalize: bool = True,
    weight_scale: float = 1.0, selection_bias: jax.Array | None = None, expert_groups: int = 1,
    top_expert_groups: int = 1, capacity: int | None = None, mask: jax.Array | None = None, backend: str = "auto",
    plan: Plan | None = None,
) -> Routing:  # fmt: skip
    """Chooses k of E experts for each token, and sorts the chosen rows by expert, as grouped products read them.

    Scores are `softmax(logits)` or `sigmoid(logits)`, in float32. A token takes the k experts with the largest
    `scores + selection_bias`, on ties the lower expert. Its weights are the scores of those k, divided by their sum
    (normalize), times weight_scale. Quotients of scores are right for all finite logits, also where float32 has no such
    small scores; only where all scores are exactly 0 they are 0, as of DeepSeek-V3's code, which adds 1e-20 to a sum.
    Without selection_bias and groups the logits are compared, which have the order of the scores: the choice is then
    bit-identical on all devices and backends. No host sync; new logits never recompile. Differentiable (reverse mode)
    in logits through weights, aux_loss and z_loss; the choice has no gradient. Deterministic.

    >>> import jax.numpy as jnp, jaxops
    >>> logits = jnp.array([[2., 0., 1.], [0., 3., 3.], [4., 1., 0.]])  # three tokens, three experts
    >>> r = jaxops.route(logits, 2)
    >>> r.experts.tolist(), r.group_offsets.tolist(), r.row_indices.tolist()  # expert 0 has tokens 0 and 2, ...
    ([[0, 2], [1, 2], [0, 1]], [0, 2, 4, 6], [0, 2, 1, 2, 0, 1])
    >>> r.row_positions.tolist(), (100 * r.weights).round().tolist()
    ([[0, 4], [2, 5], [1, 3]], [[73.0, 27.0], [50.0, 50.0], [95.0, 5.0]])

    Args:
      logits: [T, E], bfloat16, float16 or float32. -inf excludes an expert while others are left. A NaN ranks last; if
        it makes a score NaN (softmax: all of the token's, sigmoid: its own and the sum of the weights), that token's
        weights and both losses are NaN. The k experts of a token are different for any logits.
      k: experts per token, from 1 to E (with groups: to the number of experts in top_expert_groups groups).
      score: "softmax" over all experts, or "sigmoid" of each logit (DeepSeek-V3).
      normalize: whether a token's weights add up to weight_scale.
      weight_scale: a Python number, DeepSeek-V3's routed scaling factor.
      selection_bias: [E] float32, added to the scores for the choice only (see `update_router_bias`); no gradient.
      expert_groups: number of groups of E / expert_groups neighbouring experts.
      top_expert_groups: number of groups that a token may choose from: those with the largest sums of their two best
        `scores + selection_bias`.
      capacity: maximum rows of an expert; its first tokens get them. A choice beyond it is dropped: it has no row and
        weight 0. The token's other weights are not normalized again. None drops nothing.
      mask: [T] bool, which tokens count; None for all. Another token, such as padding, has no row, weights of 0 and the
        experts 0 to k - 1. It takes no place of a capacity, and is not in load, aux_loss and z_loss. Its logits (NaN,
        too) change no other token's results; their gradient is 0.
      backend: "auto" takes the Pallas kernels on a GPU, XLA on CPU and TPU; "pallas" (interpreted on a CPU) or "xla"
        runs or raises.
      plan: a `Plan` instead of the tuned or heuristic one.

    Returns:
      A `Routing`. Its losses are means over the tokens of this call (of this device) that count, without any factor; 0
      without such tokens.

    Raises:
      ValueError: shapes, k, groups or capacity that do not fit, an unknown score or backend.
      TypeError: dtypes that the kernels do not take, static arguments that are not Python numbers; forward-mode
        differentiation (JAX's own error).

    Residuals: "route.routing" (checkpoint names).

    Source: aux_loss is equation 4 of the Switch Transformer (Fedus et al. 2021, arXiv:2101.03961), for k > 1 and
    sigmoid scores equations 17 to 20 of DeepSeek-V3 (arXiv:2412.19437) over the tokens of a call instead of a sequence;
    z_loss is equation 5 of ST-MoE (Zoph et al. 2022, arXiv:2202.08906); selection_bias and groups are DeepSeek-V3's.
    """
    check_float("logits", logits, "[T, E]")
    T, E = logits.shape
    k, expert_groups = check_integer("k", k), check_integer("expert_groups", expert_groups)
    top_expert_groups = check_integer("top_expert_groups", top_expert_groups)
    check_choice("score", score, SCORES)
    if not 1 <= k <= E:
        raise ValueError(f"k={k} must be from 1 to E={E}, the number of experts.")
    if expert_groups < 1 or E % expert_groups:
        raise ValueError(f"expert_groups={expert_groups} must divide the E={E} experts into equal groups.")
    if not 1 <= top_expert_groups <= expert_groups:
        raise ValueError(f"top_expert_groups={top_expert_groups} must be from 1 to expert_groups={expert_groups}.")
    size = E // expert_groups
    if k > (most := top_expert_groups * size):
        groups = f"top_expert_groups={top_expert_groups} groups of {size}"
        raise ValueError(f"k={k} experts cannot come from {groups}: at most {most} can.")
    if capacity is not None and check_integer("capacity", capacity) < 1:
        raise ValueError(f"capacity={capacity} must be at least 1, or None to drop nothing.")
    if not below(T * E, _MAX_ELEMENTS):
        raise ValueError(f"logits have {T} x {E} elements; fewer than 2**31 are possible: route the tokens in parts.")
    if selection_bias is not None:
        # In bfloat16 a step of 0.001 would be lost.
        check_exact("selection_bias", selection_bias, "float32", "[E]", (E,), "a number for each column of logits")
        selection_bias = jax.lax.stop_gradient(selection_bias)
    if mask is not None:
        check_exact("mask", mask, "bool", "[T]", (T,), "True for each token that counts")
    # Choosing from all groups needs no groups.
    groups = (1, 1) if top_expert_groups == expert_groups else (expert_groups, top_expert_groups)
    normalize, weight_scale = check_flag("normalize", normalize), check_number("weight_scale", weight_scale)
    # An expert has at most T rows, since a token chooses it once.
    capacity = None if capacity is None or (not is_symbolic(T) and capacity >= T) else int(capacity)
    spec = Spec(k, score, normalize, weight_scale, *groups, capacity, selection_bias is not None)
    return _route(spec, *PLANNER.prepare(Problem(T, E, groups[0]), backend, plan, logits, selection_bias, mask))


def route_choices(
    experts: jax.Array, weights: jax.Array, num_experts: int, *, mask: jax.Array | None = None,
    logits: jax.Array | None = None, score: Literal["softmax", "sigmoid"] = "softmax", backend: str = "auto",
    plan: Plan | None = None,
) -> Routing:  # fmt: skip
    """The `Routing` of experts and weights that another router chose: sorts the chosen rows by expert, as `route`.

    A choice that is not from 0 to num_experts - 1, such as -1, has no row and weight 0, and is not in the load. A token
    may choose an expert several times: each choice has a row. No host sync; new choices never recompile. Differentiable
    (reverse mode) in weights, and in logits through aux_loss and z_loss. Deterministic.

    >>> import jax.numpy as jnp, jaxops
    >>> experts = jnp.array([[1, 0], [1, 2], [0, 2]], jnp.int32)  # of three tokens, the last one is padding
    >>> weights, mask = jnp.full((3, 2), 0.5), jnp.array([True, True, False])
    >>> r = jaxops.route_choices(experts, weights, 3, mask=mask)
    >>> r.load.tolist(), r.group_offsets.tolist(), r.row_indices.tolist()
    ([1, 2, 1], [0, 1, 3, 4], [0, 0, 1, 1, 0, 0])
    >>> r.weights.tolist(), r.aux_loss is None
    ([[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]], True)

    Args:
      experts: [T, k] int32, as of `jax.lax.top_k`; 1 <= k <= num_experts, as in `route`.
      weights: [T, k], bfloat16, float16 or float32, the factor on each choice's result. They are not normalized.
      num_experts: number of experts E, a Python integer.
      mask: [T] bool, which tokens count; None for all. Another token, such as padding, has no row, weights of 0, and is
        not in load, aux_loss and z_loss. Its weights and logits (NaN, too) reach no result; their gradient is 0.
      logits: [T, E], bfloat16, float16 or float32, of which aux_loss and z_loss are made, as by `route`. Without them
        both are None.
      score: of the logits, "softmax" or "sigmoid", as in `route`.
      backend: as in `route`.
      plan: a `Plan` of `route` for T * k tokens with one choice each; only plan.fwd counts.

    Returns:
      A `Routing`. Its experts are those that were passed.

    Raises:
      ValueError: shapes that do not fit, k larger than num_experts, an unknown score or backend.
      TypeError: dtypes that the kernels do not take, num_experts that is not a Python integer; forward-mode
        differentiation (JAX's own error).

    Residuals: "route.routing" (checkpoint names).

    Source: the sort of MegaBlocks' routers (Gale et al. 2022, arXiv:2211.15841); the losses are those of `route`.
    """
    E = check_integer("num_experts", num_experts, 1)
    check_array("experts", experts, "an int32 array [T, k]")
    if len(experts.shape) != 2:
        raise ValueError(f"experts has shape {tuple(experts.shape)}; it must be [T, k].")
    T, k = experts.shape
    check_exact("experts", experts, "int32", "[T, k]", (T, k), "the number of each choice's expert")
    if not 1 <= k <= E:
        raise ValueError(f"experts has shape {(T, k)}: k={k} choices of each token must be from 1 to num_experts={E}.")
    check_float("weights", weights, "[T, k]")
    if tuple(weights.shape) != (T, k):
        raise ValueError(f"weights has shape {tuple(weights.shape)}; it must be that of experts, {(T, k)}.")
    check_choice("score", score, SCORES)
    if mask is not None:
        check_exact("mask", mask, "bool", "[T]", (T,), "True for each token that counts")
    if logits is not None:
        check_float("logits", logits, "[T, E]")
        if tuple(logits.shape) != (T, E):
            raise ValueError(f"logits has shape {tuple(logits.shape)}; it must be [T, num_experts] = {(T, E)}.")
    if not below(T * E, _MAX_ELEMENTS):
        raise ValueError(f"{T} tokens x {E} experts; fewer than 2**31 are possible: route the tokens in parts.")
    operands = experts, weights.astype(jnp.float32), logits, mask
    return _route_choices(E, score, *PLANNER.prepare(Problem(T * k, E), backend, plan, *operands))


def update_router_bias(selection_bias: jax.Array, load: jax.Array, rate: float | jax.Array) -> jax.Array:
    """The next step's selection_bias: plus `rate` for an expert with a load below the mean, minus `rate` above it.

    Call it once per training step, outside of the gradient, with the load summed over devices (`jax.lax.psum`).

    >>> import jax.numpy as jnp, jaxops
    >>> jaxops.update_router_bias(jnp.zeros(3), jnp.array([5, 1, 3]), 0.5)
    Array([-0.5,  0.5,  0. ], dtype=float32)

    Args:
      selection_bias: [E] float32, as in `route`.
      load: [E], `Routing.load`, or its sum over devices or microbatches.
      rate: a number or a scalar array; DeepSeek-V3 uses 0.001, and 0 at the end.

    Returns:
      [E] float32.

    Raises:
      ValueError: selection_bias and load of different shapes.
      TypeError: a rate that is not a number.

    Source: Wang et al. 2024 (arXiv:2408.15664), and DeepSeek-V3 (arXiv:2412.19437), 2.1.2.
    """
    check_array("selection_bias", selection_bias, "a float32 array [E]")
    check_array("load", load, "the load [E] of a Routing")
    if selection_bias.shape != load.shape or len(selection_bias.shape) != 1:
        shapes = f"selection_bias has shape {tuple(selection_bias.shape)} and load {tuple(load.shape)}"
        raise ValueError(f"{shapes}; both must be [E].")
    if not isinstance(rate, (jax.Array, np.ndarray)) or rate.shape != () or not jnp.issubdtype(rate.dtype, jnp.number):
        rate = check_number("rate", rate)
    load = load.astype(jnp.float32)
    return selection_bias + rate * jnp.sign(jnp.mean(load) - load)


Maybe = jax.Array | None


def _sort(E: int, score: str, plan: Plan, experts: jax.Array, weights: jax.Array, logits: Maybe, mask: Maybe) -> Any:
    T, k = experts.shape
    has_row = (experts >= 0) & (experts < E) & (True if mask is None else mask[:, None])
    if plan.backend == "xla" or T == 0:
        rows = sort_choices(jnp.where(has_row, experts, E), E, all_valid=False)
    else:  # each choice is a token with one choice, so that a token may choose an expert twice
        assert plan.fwd is not None  # make_plan fills it
        single = jnp.where(has_row, experts, -1).reshape(-1, 1)
        rows = sort_choices_pallas(single, E=E, tile=plan.fwd, interpret=plan.on.interpret)
        positions, tokens = rows.row_positions.reshape(T, k), rows.row_indices // k
        rows = dataclasses.replace(rows, row_positions=positions, row_indices=tokens)
    given = {"weights": jnp.where(has_row, weights, 0), "experts": experts}
    return dataclasses.replace(rows, **given, **_losses(score, k, logits, rows.load, mask))


def _losses(score: str, k: int, logits: Maybe, load: jax.Array, mask: Maybe) -> dict[str, jax.Array]:
    if logits is None:
        return {}
    tokens = None if mask is None else jnp.sum(mask, dtype=jnp.int32)
    aux_loss, z_loss = losses(score, k, counted(logits, mask), load, mask, tokens)
    # `losses` divides by k choices of each token. Those without an expert are in no load.
    choices = k * (jnp.asarray(logits.shape[0], jnp.int32) if tokens is None else tokens)
    share = choices.astype(jnp.float32) / jnp.maximum(jnp.sum(load), 1)
    return {"aux_loss": aux_loss * share, "z_loss": z_loss}


def _sort_fwd(E: int, score: str, plan: Plan, experts: jax.Array, weights: jax.Array, logits: Maybe, mask: Maybe):
    routed = _route_choices(E, score, plan, experts, weights, logits, mask)
    r: Any = checkpoint_name(routed, "route.routing")
    return r, (logits, mask, partial_routing(row_positions=r.row_positions, load=r.load))


def _sort_bwd(E: int, score: str, plan: Plan, residuals, d: Routing):
    logits, mask, r = residuals
    T, k = r.row_positions.shape
    dweights = jnp.where(r.row_positions < T * k, d.weights, 0)
    if logits is None:
        return None, dweights, None, None
    _, vjp = jax.vjp(lambda logits: _losses(score, k, logits, r.load, mask), logits)
    return None, dweights, *vjp({"aux_loss": d.aux_loss, "z_loss": d.z_loss}), None


_route_choices = differentiable(_sort, _sort_fwd, _sort_bwd, static=3)


def _forward(spec: Spec, plan: Plan, logits: jax.Array, selection_bias: Maybe, mask: Maybe) -> Any:
    if plan.backend == "xla" or logits.shape[0] == 0:
        return forward_xla(spec, logits, selection_bias, mask)
    assert plan.fwd is not None  # make_plan fills it
    return forward_pallas(spec, plan.fwd, logits, selection_bias, mask, interpret=plan.on.interpret)


def _fwd(spec: Spec, plan: Plan, logits: jax.Array, selection_bias: Maybe, mask: Maybe):
    # One name for the whole Routing: to recompute a part of it takes the whole op.
    r: Any = checkpoint_name(_route(spec, plan, logits, selection_bias, mask), "route.routing")
    return r, (logits, mask, partial_routing(experts=r.experts, row_positions=r.row_positions, load=r.load))


def _bwd(spec: Spec, plan: Plan, residuals, d: Routing):
    cotangents = partial_routing(weights=d.weights, aux_loss=d.aux_loss, z_loss=d.z_loss)
    return _gradient(spec, plan, *residuals, cotangents), None, None


_route = differentiable(_forward, _fwd, _bwd, static=2)


def _backward(spec: Spec, plan: Plan, logits: jax.Array, mask: Maybe, routing: Routing, cotangents: Routing) -> Any:
    """The gradient of logits, in their dtype. Both routings are the parts that `_fwd` and `_bwd` keep."""
    if plan.backend == "xla" or logits.shape[0] == 0:
        return backward_xla(spec, logits, mask, routing, cotangents)
    assert plan.bwd is not None  # make_plan fills it
    return backward_pallas(spec, plan.bwd, logits, mask, routing, cotangents, interpret=plan.on.interpret)


def _plain_backward(spec: Spec, _: Plan, *operands) -> Any:
    return backward_xla(spec, *operands)


_gradient = differentiable_as(_backward, _plain_backward, static=2)
