"""The layer over the devices of a mesh with Auto axes: each one runs the experts over its own tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._lib.arrays.partitioning import Part, partitioned
from jaxops.ops.route import Routing, partial_routing, route_choices

Tensors = tuple[Any, ...]  # of the products: weights [E, D, F] and last [E, F, N], biases, gradients, or None

_ROUTING = ("m.", "m.", "m.", ".")


def _axes(form: str, biases: Tensors) -> tuple[str, str, str]:
    """Of the first weights, the last one, and pre-activations [T, k, F]; m: tokens, f: hidden columns. Those of one
    weight for gate and up would be on other devices, and a bias is added once."""
    axes = "..f", ".f.", "m.f"
    if form == "joined" or any(bias is not None for bias in biases):
        return tuple(text.replace("f", ".") for text in axes)  # pyright: ignore[reportReturnType]
    return axes


def forward_of_tokens(
    call: Callable, form: str, saves: bool, x: jax.Array, experts: Tensors, biases: Tensors, routing: Routing
) -> Any:
    """`call(part, save, x, experts, biases, routing)`: the result, and with save the pre-activations, else ()."""

    def of_part(part: Part, x, up, down, biases, *fields: jax.Array) -> dict[str, Any]:
        # Rows of a device's tokens are in an order of their own: the backward, which XLA may split otherwise, computes
        # the pre-activations again.
        y, pre = call(part, saves and not part.several, x, (*up, down), biases, _own(part, T, fields))
        if saves and part.several:
            pre = tuple(jnp.full((fields[1].size, w.shape[2]), jnp.nan, x.dtype) for w in up)
        return {"y": y} | _named("pre", _by_choice(pre, fields[1].shape))

    T, (up, down, pre) = x.shape[0], _axes(form, biases)
    operands, axes = (x, experts[:-1], experts[-1], biases, *_fields(routing)), ("m.", up, down, "..", *_ROUTING)
    made = partitioned(of_part, operands, axes, {"y": "m.", "pre0": pre, "pre1": pre}, split="mf")
    return made["y"], _by_row(_of(made, "pre"))


def backward_of_tokens(
    call: Callable, form: str, x: jax.Array, experts: Tensors, biases: Tensors, pre: tuple, routing: Routing,
    dout: jax.Array,
) -> Any:  # fmt: skip
    """`call(part, x, experts, biases, pre, routing, dout)`: the gradients of x, the experts, the biases and the
    router's weights."""

    def of_part(part: Part, x, up, down, biases, pre, dout, *fields: jax.Array) -> dict[str, Any]:
        pre, routing = () if part.several else _by_row(pre), _own(part, T, fields)
        dx, dexperts, dbiases, d = call(part, x, (*up, down), biases, pre, routing, dout)
        return {"x": dx, "down": dexperts[-1], "weights": d} | _named("up", dexperts[:-1]) | _named("bias", dbiases)

    T, (up, down, halves) = x.shape[0], _axes(form, biases)
    choices = _by_choice(pre, routing.row_positions.shape)
    operands = x, experts[:-1], experts[-1], biases, choices, dout, *_fields(routing)
    axes = "m.", up, down, "..", f"{halves}!", "m.", *_ROUTING
    results = {"x": "m.", "down": down, "weights": "m.", "up0": up, "up1": up}
    results |= dict.fromkeys(("bias0", "bias1", "bias2"), "..")
    made = partitioned(of_part, operands, axes, results, split="mf")
    dbiases = tuple(made.get(f"bias{i}") for i in range(len(biases)))
    return made["x"], (*_of(made, "up"), made["down"]), dbiases, made["weights"]


def _named(name: str, arrays: Any) -> dict[str, jax.Array]:
    return {f"{name}{i}": x for i, x in enumerate(arrays) if x is not None}


def _of(made: dict[str, jax.Array], name: str) -> tuple[jax.Array, ...]:
    return tuple(made[f"{name}{i}"] for i in range(2) if f"{name}{i}" in made)


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


def _by_choice(pre: tuple, choices: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Pre-activations [R, F] as [T, k, F], so that tokens are an axis."""
    return tuple(half.reshape(*choices, half.shape[1]) for half in pre)


def _by_row(pre: tuple) -> tuple[jax.Array, ...]:
    return tuple(half.reshape(half.shape[0] * half.shape[1], half.shape[2]) for half in pre)
