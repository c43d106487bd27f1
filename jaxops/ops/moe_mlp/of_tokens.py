"""The layer over the devices of a mesh with Auto axes: each one runs the experts over its own tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._lib.arrays.partitioning import Part, partitioned
from jaxops.ops.route import Routing, partial_routing, route_choices

Experts = tuple[Any, ...]  # of gate, up and down: weights [E, D, F] and [E, F, N], gradients, or None

# m: tokens, f: hidden columns. w_down has them where gate and up have D.
_WEIGHTS, _DOWN = "..f", ".f."
_ROUTING = ("m.", "m.", "m.", ".")


def forward_of_tokens(call: Callable, saves: bool, x: jax.Array, experts: Experts, routing: Routing) -> Any:
    """`call(part, save, x, experts, routing)`: the result, and with save gate and up, else ()."""

    def of_part(part: Part, x, up, down, *fields: jax.Array) -> dict[str, Any]:
        # Rows of a device's tokens are in an order of their own: the backward, which XLA may split otherwise, computes
        # gate and up again.
        y, pre = call(part, saves and not part.several, x, (*up, down), _own(part, T, fields))
        if saves and part.several:
            pre = (jnp.full((fields[1].size, up[0].shape[2]), jnp.nan, x.dtype),) * 2
        return {"y": y} | _by_choice(pre, fields[1].shape)

    T = x.shape[0]
    axes, results = ("m.", _WEIGHTS, _DOWN, *_ROUTING), {"y": "m.", "gate": "m.f", "up": "m.f"}
    made = partitioned(of_part, (x, experts[:2], experts[2], *_fields(routing)), axes, results, split="mf")
    return made["y"], _by_row(made)


def backward_of_tokens(
    call: Callable, x: jax.Array, experts: Experts, biases: Any, pre: tuple, routing: Routing, dout: jax.Array,
    sums: Experts,
) -> Any:  # fmt: skip
    """`call(part, x, experts, biases, pre, routing, dout, sums)`: the gradients of x, the experts and the router's
    weights. biases: each None."""

    def of_part(part: Part, x, up, down, pre, dout, sums, sum_down, *fields: jax.Array) -> dict[str, Any]:
        pre = () if part.several else _by_row(pre)
        made = call(part, x, (*up, down), biases, pre, _own(part, T, fields), dout, (*sums, sum_down))
        dx, (dgate, dup, ddown), _, d = made
        return {"x": dx, "gate": dgate, "up": dup, "down": ddown, "weights": d}

    T = x.shape[0]
    operands = (
        x,
        experts[:2],
        experts[2],
        _by_choice(pre, routing.row_positions.shape),
        dout,
        sums[:2],
        sums[2],
        *_fields(routing),
    )
    axes = "m.", _WEIGHTS, _DOWN, "m.f!", "m.", _WEIGHTS, _DOWN, *_ROUTING
    results = {"x": "m.", "gate": _WEIGHTS, "up": _WEIGHTS, "down": _DOWN, "weights": "m."}
    made = partitioned(of_part, operands, axes, results, split="mf")
    return made["x"], (made["gate"], made["up"], made["down"]), made["weights"]


def _fields(routing: Routing) -> tuple[jax.Array, ...]:
    positions = routing.row_positions
    return routing.weights, positions, routing.row_indices.reshape(positions.shape), routing.group_offsets


def _own(part: Part, T: int, fields: tuple[jax.Array, ...]) -> Routing:
    """The routing of a device's tokens, of those of all T: their rows, sorted by expert."""
    weights, positions, indices, offsets = fields
    E, (t, k) = offsets.shape[0] - 1, positions.shape
    if t == T:
        return partial_routing(
            weights=weights, row_positions=positions, row_indices=indices.ravel(), group_offsets=offsets
        )
    own = route_choices(jnp.searchsorted(offsets, positions, side="right").astype(jnp.int32) - 1, weights, max(E, k))
    return dataclasses.replace(own, group_offsets=own.group_offsets[: E + 1])


def _by_choice(pre: tuple, choices: tuple[int, ...]) -> dict[str, jax.Array]:
    """Gate and up [R, F] as [T, k, F], so that tokens are an axis."""
    return {name: half.reshape(*choices, half.shape[1]) for name, half in zip(("gate", "up"), pre, strict=bool(pre))}


def _by_row(made: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    halves = [made[name] for name in ("gate", "up") if name in made]
    return tuple(half.reshape(half.shape[0] * half.shape[1], half.shape[2]) for half in halves)
