"""Stacks of equal layers, one layer after another."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxops.nn import AmaxHistory
from jaxops.offload import Policy, compiler_options, scan
from models.distributed.mesh import ONCE, SHARDS, whole_layers

# Attention costs most to recompute for its bytes, and more in longer contexts; everything else is recomputed from the
# layer's input.
OFFLOADED = Policy(keep=("route",), offload=("carry", "attention"))

Layer = TypeVar("Layer", bound=nnx.Module)


def stacked(make: Callable[[nnx.Rngs], Layer], layers: int, rngs: nnx.Rngs) -> Layer:
    """`layers` of them, each with its own random numbers, as one module whose arrays have one more, leading axis."""
    return nnx.split_rngs(splits=layers)(nnx.vmap(make, in_axes=(0,), out_axes=0))(rngs)


def apply_layers(
    stacks: Sequence[Layer], call: Callable[[Layer, jax.Array, Any], tuple[jax.Array, Any]], x: jax.Array, *,
    layers: Sequence[Sequence[int]], each: Sequence[Any], policy: Policy | None, unroll: bool, training: bool,
    whole: Sequence[Callable[..., nnx.State]] | None = None,
) -> tuple[jax.Array, tuple[Any, ...]]:  # fmt: skip
    """x through all layers, and the layers' other results, stacked for each stack.

    Args:
      call: of a layer, its input and its part of `each`.
      layers: the numbers of each stack's layers. Runs of layers of one stack are scanned; layers of two stacks that
        alternate are as good as unrolled.
      each: for each stack arrays with one leading axis, the layers, or None.
      policy: what a layer's backward reads from the device or the host, and what it recomputes; None keeps everything.
      unroll: whether the layers are unrolled instead of scanned. Residuals then stay where they are computed; a loop
        copies them into stacks and out again. A step of the 1b DiT preset takes 155 ms and 49 GB unrolled, in a loop,
        whose stacks were zero-filled, 208 ms and 64 GB (H200, 2026-11-22). Compilation takes longer.
      training: whether the histories that the layers write are kept.
      whole: for each stack, from a layer's stored parameters to those it computes with, as of
        `models.distributed.mesh.whole_layers`; None for the same. A policy sees what is gathered `ONCE` as the layer's
        input, if layers are unrolled; a loop would gather it for all layers before the first, so each iteration does.

    Raises:
      ValueError: unroll with an offloading policy; a policy with a name that no value of a layer has.
    """
    if unroll and (names := ", ".join(_offloaded(policy))):
        raise ValueError(
            f"unroll with a policy that offloads {names}: only a loop has moved a layer's before it makes the next "
            "one's. Set unroll to false."
        )
    split = [nnx.split(stack, nnx.Param, ...) for stack in stacks]
    runs = _runs(layers)
    # One split into runs, whose gradient is one concatenation.
    parts = [
        iter(_cut((params, others, own), [len(run) for of, run in runs if of == number]))
        for number, ((_, params, others), own) in enumerate(zip(split, each, strict=True))
    ]
    outs: list[list[Any]] = [[] for _ in stacks]
    for number, _ in runs:
        gathers = None if whole is None else whole[number]
        x, out = _run(split[number][0], call, x, next(parts[number]), policy, unroll, gathers)
        outs[number].append(out)
    joined: list[Any] = [jax.tree.map(lambda *a: a[0] if len(a) == 1 else jnp.concatenate(a), *of) for of in outs]
    if training:
        for stack, (_, histories) in zip(stacks, joined, strict=True):
            nnx.update(stack, histories)
    return x, tuple(out for out, _ in joined)


def options_of(model: Any, *stacks: str) -> dict[str, Any]:
    """The options of `apply_layers` that a model and the names of its stacks give."""
    c, whole = model.config, whole_layers(model, *stacks)
    return {"policy": c.policy, "unroll": c.unroll, "training": not model.use_running_average, "whole": whole}


def _runs(layers: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """(number of the stack, its layers) for each run of layers of one stack, in order."""
    of = {layer: number for number, some in enumerate(layers) for layer in some}
    return [(number, list(run)) for number, run in itertools.groupby(sorted(of), of.__getitem__)]


def _cut(tree: Any, sizes: list[int]) -> list[Any]:
    """The parts of all arrays along the first axis."""
    if len(sizes) == 1:
        return [tree]
    leaves, treedef = jax.tree.flatten(tree)
    return [treedef.unflatten(part) for part in zip(*(jax.lax.split(leaf, sizes) for leaf in leaves), strict=True)]


def _run(
    graphdef: nnx.GraphDef, call: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]], x: jax.Array, stack: Any,
    policy: Policy | None, unroll: bool, gathers: Callable[..., nnx.State] | None,
) -> tuple[jax.Array, tuple[Any, nnx.State]]:  # fmt: skip
    once = () if not unroll else SHARDS if policy is None else ONCE
    inner = tuple(axis for axis in SHARDS if axis not in once)

    def layer(x: jax.Array, state: tuple[nnx.State, nnx.State, Any]) -> tuple[jax.Array, tuple[Any, nnx.State]]:
        params, others, own = state
        module = nnx.merge(graphdef, params if gathers is None else gathers(params, axes=inner), others, copy=True)
        x, out = call(module, x, own)
        return x, (out, nnx.state(module, AmaxHistory))

    def first(state: tuple[nnx.State, nnx.State, Any]) -> tuple[nnx.State, nnx.State, Any]:
        return state if gathers is None else (gathers(state[0], axes=once), *state[1:])

    if unroll:
        if policy is not None:
            policy.check(layer, x, first(jax.tree.map(lambda leaf: leaf[0], stack)))
            layer = jax.checkpoint(layer, policy=policy)
        # Traced and lowered once; XLA inlines the calls. `lm 3b` compiles in 41.5 s instead of 44.5 (H200, 2026-11-29).
        each = jax.jit(lambda x, state: layer(x, first(state)))
        return _one_after_another(each, x, stack)
    return jax.lax.scan(layer, x, stack) if policy is None else scan(layer, x, stack, policy=policy)


def _one_after_another(layer: Callable[[Any, Any], tuple[Any, Any]], x: Any, stacks: Any) -> tuple[Any, Any]:
    """As `jax.lax.scan`."""
    leaves, tree = jax.tree.flatten(stacks)
    outs = []
    for parts in zip(*map(_unstacked, leaves), strict=True):
        x, out = layer(x, jax.tree.unflatten(tree, parts))
        outs.append(out)
    return x, jax.tree.map(lambda *parts: jnp.stack(parts), *outs)


def _unstacked(stack: jax.Array) -> Any:
    """A stack's layers. The gradient of `jnp.unstack` is one concatenation; indexing would add a stack a layer."""
    parts = jnp.unstack(stack)
    # XLA fuses a vector's slice into the kernels that read the vector, and with it the number of the layer: then layers
    # share no kernel. Of `lm 3b`'s 318 fusions that differ, 191 differ in nothing else.
    return jax.lax.optimization_barrier(parts) if stack.ndim <= 2 else parts


def _offloaded(policy: Policy | None) -> tuple[str, ...]:
    return () if policy is None else policy.offload


def options_for(policy: Policy | None, mesh: Mesh | None = None) -> dict[str, Any]:
    """XLA options for a step whose layers have that policy, over that mesh.

    XLA's Triton products are off: it compiles and times many candidates of each product, and then mostly takes cuBLAS.
    Without them the step of `lm 3b` takes XLA 10.5 s instead of 14 to 18, and runs as fast (169.1 and 169.5 ms; H200,
    2026-11-29). With routers over several devices it runs faster, too: where the autotuner replaces a Triton product by
    cuBLAS, the call loses the time that the router's products state, and XLA's scheduler hides a collective behind a
    product that takes a tenth of its time (177.3 ms instead of 179.8 on two H200s, `data=2`, 2026-11-25).

    Over the GPUs of one process parameters, gradients and tokens are sent by the cards' copy engines, which need no
    multiprocessor (`jaxops.parallel.exchange`).

    With a policy XLA's memory limit is off over several devices, as for offloading. A step over four fifths of the card
    is over it: then nothing is hidden. In the backward loop of the 30b preset, compiled for four H200s with `fsdp=4`
    (126 GB), no collective of 28 was asynchronous; without the limit 16 of 26 are (jaxlib 0.11.2, 2026-11-26).
    """
    options = compiler_options(offloads=bool(_offloaded(policy)))
    if not options:
        return options
    options["xla_gpu_enable_triton_gemm"] = False
    if mesh is not None and mesh.size > 1:
        if policy is not None:
            options["xla_gpu_memory_limit_slop_factor"] = 400
        if not mesh.is_multi_process:
            options["xla_gpu_collective_permute_mode"] = "COLLECTIVES_PEER_MEMORY"
    return options


def remark(policy: Policy | None) -> str:
    """The line about the policy, with its line break; empty for a policy that moves nothing."""
    names = ", ".join(_offloaded(policy))
    only = "" if jax.default_backend() == "gpu" else ", which is this machine's only one: nothing moves"
    return f"offload: {names} to the host's memory{only}\n" if names else ""
