"""The public functions: checks, then the custom_vjp that wires the passes together."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.checks import check_array, check_choice, check_flag, check_float, check_integer, check_number
from jaxops._lib.device import device_of
from jaxops._lib.differentiable import differentiable
from jaxops._lib.manual_axes import vary_together
from jaxops.ops.route.bwd_pallas import backward_pallas
from jaxops.ops.route.fwd_pallas import forward_pallas
from jaxops.ops.route.plan import SCORES, Plan, Problem, Spec, make_plan
from jaxops.ops.route.routing import Cotangents, Routing, Saved
from jaxops.ops.route.xla import backward_xla, forward_xla

_MOST_ELEMENTS = 2**31  # of one array: row numbers, and offsets in a kernel, are int32


def route(
    logits: jax.Array,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    weight_scale: float = 1.0,
    selection_bias: jax.Array | None = None,
    expert_groups: int = 1,
    top_expert_groups: int = 1,
    capacity: int | None = None,
    backend: str = "auto",
    plan: Plan | None = None,
) -> Routing:
    """Chooses k of E experts for each token, and finds where the chosen rows lie when they are sorted by expert: what a grouped product needs.

    Scores are `softmax(logits)` or `sigmoid(logits)`, in float32. A token takes the k experts with the largest `scores + selection_bias` (of equal ones that with the
    lower number), from its best groups only, where there are groups. Its weights are the scores of those k, without selection_bias, divided by their sum with
    `normalize` (to which 1e-20 is added), times `weight_scale`. Rows are sorted by expert and within an expert by token; `group_offsets` says where each one's start.
    Nothing reaches the host: other logits never recompile. Differentiable (reverse mode) in logits through weights, aux_loss and z_loss; the choice itself has
    no gradient. Deterministic: no atomics.

    Without selection_bias and without groups the logits are compared instead of the scores, which are in the same order: the choice is the same to the bit on every
    device and backend, also where scores round to equal numbers.

    >>> import jax.numpy as jnp, jaxops
    >>> logits = jnp.array([[2., 0., 1.], [0., 3., 3.], [4., 1., 0.]])  # three tokens, three experts
    >>> r = jaxops.route(logits, 2)
    >>> r.experts.tolist(), r.group_offsets.tolist(), r.row_indices.tolist()  # expert 0 has tokens 0 and 2, expert 1 tokens 1 and 2, expert 2 tokens 0 and 1
    ([[0, 2], [1, 2], [0, 1]], [0, 2, 4, 6], [0, 2, 1, 2, 0, 1])
    >>> r.row_positions.tolist(), (100 * r.weights).round().tolist()
    ([[0, 4], [2, 5], [1, 3]], [[73.0, 27.0], [50.0, 50.0], [95.0, 5.0]])

    Args:
      logits: [T, E], bfloat16, float16 or float32: of the T tokens of this call; every one is routed. -inf keeps an expert from being chosen as long as
        others are left. A NaN ranks last among its token's experts; where it makes a score NaN, it makes that token's weights and both losses NaN, too
        (softmax: all scores of the token, sigmoid: its own and the weights' sum). Choices stay k different experts, whatever the logits.
      k: experts a token, from 1 to E (with groups: to what top_expert_groups of them hold).
      score: "softmax" over all experts, or "sigmoid" of each logit (DeepSeek-V3).
      normalize: whether a token's weights add up to weight_scale.
      weight_scale: a Python number, the routed scaling factor of DeepSeek-V3.
      selection_bias: [E] float32, added to the scores for the choice alone (balancing without a loss, see `update_router_bias`); it gets no gradient.
      expert_groups: experts are in that many groups of E / expert_groups neighbours.
      top_expert_groups: how many groups a token may choose from: those with the largest sum of their two best `scores + selection_bias`.
      capacity: most rows of an expert: those of the first tokens that chose it. A choice past it is dropped: it has no row and weight 0. The token's other
        weights stay as they are, and are not divided by what is left of their sum. None drops nothing.
      backend: "auto" takes the Pallas kernels on a GPU and plain XLA on CPU and TPU; "pallas" (interpreted on a CPU) or "xla" runs or raises.
      plan: a `Plan`, instead of the heuristic one.

    Returns:
      A `Routing`. Its losses are means over the tokens of this call (under shard_map, of this device) without any factor; both are 0 where T is 0.

    Raises:
      ValueError: logits of another rank, k, groups or capacity that do not fit, a selection_bias of another shape, an unknown score or backend.
      TypeError: dtypes that the kernels do not take, static arguments that are no Python numbers; forward-mode differentiation (JAX's own error).

    Residuals: named "route.routing" (checkpoint names).

    Source: aux_loss is equation 4 of the Switch Transformer (Fedus et al. 2021, arXiv:2101.03961), for k > 1 and sigmoid scores as equations 17 to 20 of
    DeepSeek-V3 (arXiv:2412.19437), over this call's tokens instead of each sequence's; z_loss is equation 5 of ST-MoE (Zoph et al. 2022, arXiv:2202.08906);
    selection_bias, groups and their two best scores are DeepSeek-V3's.
    """
    check_float("logits", logits, "[T, E]")
    T, E = logits.shape
    spec = _check(T, E, k, score, expert_groups, top_expert_groups, capacity)
    if selection_bias is not None:
        check_array("selection_bias", selection_bias, "a float32 array [E]")
        if tuple(selection_bias.shape) != (E,):
            raise ValueError(
                f"selection_bias has shape {tuple(selection_bias.shape)}; it must be [E] = ({E},), a number for each column of logits."
            )
        if selection_bias.dtype != jnp.float32:
            raise TypeError(
                f"selection_bias is {selection_bias.dtype}; write selection_bias.astype(jnp.float32). In bfloat16 a step of 0.001 would be lost."
            )
        selection_bias = jax.lax.stop_gradient(selection_bias)
    plan = make_plan(Problem(T, E), device_of(logits, selection_bias), backend=backend, plan=plan)
    spec = dataclasses.replace(
        spec, normalize=check_flag("normalize", normalize), weight_scale=check_number("weight_scale", weight_scale)
    )
    return _route(spec, plan, *vary_together(logits, selection_bias))


def update_router_bias(selection_bias: jax.Array, load: jax.Array, rate: float | jax.Array) -> jax.Array:
    """The next step's selection_bias: `rate` more for an expert that fewer tokens chose than the mean, `rate` less for one that more did.

    Once a training step, outside the gradient; with several devices, of the load's sum over them (`jax.lax.psum`).

    >>> import jax.numpy as jnp, jaxops
    >>> jaxops.update_router_bias(jnp.zeros(3), jnp.array([5, 1, 3]), 0.5)
    Array([-0.5,  0.5,  0. ], dtype=float32)

    Args:
      selection_bias: [E] float32, as `route` takes it.
      load: [E], a number for each expert: `Routing.load`, or its sum over devices or microbatches.
      rate: the size of the step, a number or a scalar array; DeepSeek-V3 has 0.001, and 0 at the end.

    Returns:
      [E] float32.

    Raises:
      ValueError: selection_bias and load of different shapes.
      TypeError: a rate that is no number.

    Source: Wang et al. 2024 (arXiv:2408.15664), and DeepSeek-V3 (arXiv:2412.19437), 2.1.2.
    """
    check_array("selection_bias", selection_bias, "a float32 array [E]")
    check_array("load", load, "the load [E] of a Routing")
    if selection_bias.shape != load.shape or len(selection_bias.shape) != 1:
        raise ValueError(
            f"selection_bias has shape {tuple(selection_bias.shape)} and load {tuple(load.shape)}; both must be [E]."
        )
    if not isinstance(rate, (jax.Array, np.ndarray)) or rate.shape != () or not jnp.issubdtype(rate.dtype, jnp.number):
        rate = check_number("rate", rate)
    load = load.astype(jnp.float32)
    return selection_bias + rate * jnp.sign(jnp.mean(load) - load)


def _check(T: int, E: int, k: Any, score: str, expert_groups: Any, top_expert_groups: Any, capacity: Any) -> Spec:
    """The static part of a call; normalize and weight_scale are filled in later."""
    k, expert_groups, top_expert_groups = (
        check_integer("k", k),
        check_integer("expert_groups", expert_groups),
        check_integer("top_expert_groups", top_expert_groups),
    )
    check_choice("score", score, SCORES)
    if not 1 <= k <= E:
        raise ValueError(f"k={k} must be from 1 to E={E}, the number of experts.")
    if expert_groups < 1 or E % expert_groups:
        raise ValueError(f"expert_groups={expert_groups} must divide the E={E} experts into equal groups.")
    if not 1 <= top_expert_groups <= expert_groups:
        raise ValueError(f"top_expert_groups={top_expert_groups} must be from 1 to expert_groups={expert_groups}.")
    if k > top_expert_groups * (E // expert_groups):
        raise ValueError(
            f"k={k} experts cannot come from top_expert_groups={top_expert_groups} groups of {E // expert_groups}: at most {top_expert_groups * (E // expert_groups)} can."
        )
    if capacity is not None and check_integer("capacity", capacity) < 1:
        raise ValueError(f"capacity={capacity} must be at least 1, or None to drop nothing.")
    if T * E >= _MOST_ELEMENTS:
        raise ValueError(
            f"logits have {T} x {E} elements; row numbers are int32, so fewer than 2**31 are possible: route the tokens in parts."
        )
    # A token chooses an expert once, so T rows are as many as there can be; and all groups are as good as none.
    capacity = None if capacity is None or capacity >= T else int(capacity)
    expert_groups, top_expert_groups = (
        (1, 1) if top_expert_groups == expert_groups else (expert_groups, top_expert_groups)
    )
    return Spec(k, score, True, 1.0, expert_groups, top_expert_groups, capacity)


def _route_forward(spec: Spec, plan: Plan, logits: jax.Array, selection_bias: jax.Array | None) -> Any:
    (T, E), k = logits.shape, spec.k
    if T == 0:
        zero, none = jnp.zeros((), jnp.float32), jnp.zeros((0, k), jnp.int32)
        return Routing(
            none.astype(jnp.float32),
            none,
            none.reshape(0),
            none,
            jnp.zeros(E + 1, jnp.int32),
            jnp.zeros(E, jnp.int32),
            zero,
            zero,
        )
    if plan.backend == "xla":
        return forward_xla(spec, logits, selection_bias)
    assert plan.fwd is not None  # make_plan fills it
    return forward_pallas(spec, plan.fwd, logits, selection_bias, interpret=plan.on.interpret)


def _route_fwd(spec: Spec, plan: Plan, logits: jax.Array, selection_bias: jax.Array | None):
    # One name for all of it: what is left out would take the whole op to make again.
    routing: Any = checkpoint_name(_route(spec, plan, logits, selection_bias), "route.routing")
    return routing, Saved(logits, routing.experts, routing.row_positions, routing.load)


def _route_bwd(spec: Spec, plan: Plan, saved: Saved, cotangents: Routing):
    return _gradient(spec, plan, saved, Cotangents(cotangents.weights, cotangents.aux_loss, cotangents.z_loss)), None


_route = differentiable(_route_forward, _route_fwd, _route_bwd, static=2)


def _find_gradient(spec: Spec, plan: Plan, saved: Saved, cotangents: Cotangents) -> Any:
    """The gradient of logits, in their dtype."""
    if saved.logits.shape[0] == 0:
        return jnp.zeros_like(saved.logits)
    if plan.backend == "xla":
        return backward_xla(spec, saved, cotangents)
    assert plan.bwd is not None  # make_plan fills it
    return backward_pallas(spec, plan.bwd, saved, cotangents, interpret=plan.on.interpret)


def _gradient_fwd(spec: Spec, plan: Plan, saved: Saved, cotangents: Cotangents):
    return _gradient(spec, plan, saved, cotangents), (saved, cotangents)


def _gradient_bwd(spec: Spec, plan: Plan, operands, cotangent):
    """Second derivatives are JAX's own, of the portable backend."""
    saved, cotangents = operands
    _, vjp = jax.vjp(
        lambda logits, cotangents: _find_gradient(spec, Plan("xla"), saved._replace(logits=logits), cotangents),
        saved.logits,
        cotangents,
    )
    dlogits, dcotangents = vjp(cotangent)
    return Saved(dlogits, None, None, None), dcotangents  # pyright: ignore[reportArgumentType]  # None is what custom_vjp takes for no gradient


_gradient = differentiable(_find_gradient, _gradient_fwd, _gradient_bwd, static=2)
