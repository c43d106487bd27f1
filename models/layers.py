"""Equal layers, one after another: their parameters stacked, and one of them compiled, whatever their number."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxops.offload import Policy, compiler_options, scan

# Attention costs the most to compute again for its bytes, and more so the longer the context; everything else is computed again from the layer's input.
OFFLOADED = Policy(keep=("route",), offload=("carry", "attention"))

Layer = TypeVar("Layer", bound=nnx.Module)


def stacked(make: Callable[[nnx.Rngs], Layer], layers: int, rngs: nnx.Rngs) -> Layer:
    """`layers` of them, each with random numbers of its own, as one module whose arrays have one more axis, the first."""
    return nnx.split_rngs(splits=layers)(nnx.vmap(make, in_axes=(0,), out_axes=0))(rngs)


def scan_layers(
    stack: Layer,
    call: Callable[[Layer, jax.Array], tuple[jax.Array, Any]],
    x: jax.Array,
    *,
    policy: Policy | None,
    training: bool,
    whole: Callable[[nnx.State], nnx.State] = lambda params: params,
) -> tuple[jax.Array, Any]:
    """x through all layers, and what each gives beside it, stacked.

    Args:
      policy: what of a layer's inside is kept, offloaded or recomputed; None keeps all that the backward needs.
      training: whether what the layers write besides parameters, as histories, stays written.
      whole: of a layer's parameters as they are stored, those it computes with.
    """
    graphdef, params, others = nnx.split(stack, nnx.Param, ...)

    def layer(x: jax.Array, state: tuple[nnx.State, nnx.State]) -> tuple[jax.Array, tuple[Any, nnx.State]]:
        params, others = state
        module = nnx.merge(graphdef, whole(params), others, copy=True)
        x, out = call(module, x)
        return x, (out, nnx.state(module, nnx.Not(nnx.Param)))

    run = jax.lax.scan(layer, x, (params, others)) if policy is None else scan(layer, x, (params, others), policy=policy)
    x, (outs, others) = run
    if training:
        nnx.update(stack, others)
    return x, outs


def options_for(policy: Policy | None) -> dict[str, Any]:
    """Of XLA, for a step whose layers have that policy."""
    return compiler_options(offloads=policy is not None and bool(policy.offload))


def remark(policy: Policy | None) -> str:
    """What a run says of it, with the line's end; nothing of a policy that moves nothing."""
    if policy is None or not policy.offload:
        return ""
    what = f"offload: {', '.join(policy.offload)} to the host's memory"
    return f"{what}\n" if jax.default_backend() == "gpu" else f"{what}, which is this machine's only one: nothing moves\n"
