"""How XLA splits an op over the devices of a mesh with Auto axes, outside of `jax.shard_map`.

XLA sees neither into a kernel nor into a loop over row tiles: it would gather the operands on every device. A rule in
letters says which axes may be split, as `jax.experimental.custom_partitioning` takes it (Shardy and GSPMD).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.symbolic import is_symbolic
from jaxops._lib.planning.device import over_several_devices, warn_once

Names = tuple[str, ...]  # mesh axes
ALIGNED = 8  # columns of a device are a multiple, so that rows stay whole 16 bytes for TMA


class Part:
    """What a device computes of a call.

    Attributes:
      axes: the mesh axes over which each letter is split; only of a call that is split.
      several: whether the program runs on several devices, so that another call may be split otherwise.
    """

    def __init__(self, axes: dict[str, Names], *, several: bool):
        self.axes, self.several = axes, several

    def first(self, letter: str) -> jax.Array | None:
        """Whether this device is the first of those among which the letter is split, for what a sum over them has once;
        None if it is not split."""
        names = self.axes.get(letter)
        return lax.axis_index(names) == 0 if names else None


WHOLE = Part({}, several=False)


def partitioned(
    call: Callable, operands: tuple, axes: Sequence[str], results: str | dict[str, str], *, split: str
) -> Any:
    """`call(WHOLE, *operands)`, of which each device of a mesh may compute a part: `call(part, *its operands)`.

    An operand's axes are a text with a letter for each. Axes of one letter are split alike, over the mesh axes over
    which XLA has split one of them: the letters of `split` in order, of which the first one is the ragged rows. An axis
    "." is never split. An operand "#" is offsets of rows: a device gets those of its own rows, clipped to them. Other
    rows then lie outside of all groups. An operand whose text ends in "!" was made by another call of this function,
    which may have been split otherwise: with part.several it counts for nothing.

    A result that lacks a letter of the operands is added over the devices that split it, in the dtype that call
    returns, and then cast. Inside of `jax.shard_map`, `jax.vmap` and `jax.export`, on one device, and of symbolic
    or empty sizes, all is as without this function.

    Args:
      axes: of each operand, a pytree of arrays that are all alike.
      results: the axes of each array of the result, or of each of a dictionary by its name.
    """
    leaves, tree = jax.tree.flatten(operands)
    if not over_several_devices() or any(is_symbolic(size) or size == 0 for x in leaves for size in x.shape):
        return call(WHOLE, *operands)
    given = [text for x, text in zip(operands, axes, strict=True) for _ in jax.tree.leaves(x)]
    flat = lambda part, *leaves: call(part, *tree.unflatten(leaves))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    closed, out = jax.make_jaxpr(functools.partial(flat, WHOLE), return_shape=True)(*types)
    plain, (outs, out_tree) = jaxpr_as_fun(closed), jax.tree.flatten(out)
    made = [results] * len(outs) if isinstance(results, str) else [results[name] for name in sorted(out)]
    rule = _Rule(flat, tuple(text.removesuffix("!") for text in given), tuple(made), split)
    of_devices = custom_partitioning(lambda *leaves: tuple(plain(*leaves)))
    of_devices.def_partition(rule.partition, rule.infer, sharding_rule=rule.text, **rule.factors)  # pyright: ignore[reportArgumentType]
    batched = functools.partial(_batched, flat, plain, [text.endswith("!") for text in given])
    # In a tuple: JAX 0.12 would ask a primitive with a jaxpr for a rule that is not public.
    calls = (jax.make_jaxpr(of_devices)(*types),)
    return out_tree.unflatten(_split.bind(*leaves, plain=plain, batched=batched, calls=calls))


def _batched(flat: Callable, plain: Callable, made: list[bool], leaves: Sequence[Any], mapped: Sequence[Any]) -> tuple:
    """Under `jax.vmap` nothing is split, and neither was what a mapped call made."""
    if any(own and axis is None for own, axis in zip(made, mapped, strict=True)):
        plain = lambda *leaves: jax.tree.leaves(flat(Part({}, several=True), *leaves))
    outs = jax.vmap(plain, in_axes=tuple(mapped))(*leaves)
    return outs, (0,) * len(outs)


def warn_if_split(op: str, *operands: Any) -> tuple:
    """The operands; once a warning, if XLA has split the rows of the first matrix of an op that has no such rule."""
    leaves, tree = jax.tree.flatten(operands)
    first = next((i for i, x in enumerate(leaves) if len(x.shape) > 1), None)
    empty = any(0 in x.shape for x in leaves)  # no kernel runs
    if first is not None and not empty and over_several_devices():
        leaves[first] = _watched(op, leaves[first])
    return tree.unflatten(leaves)


def _watch(op: str, x: jax.Array) -> jax.Array:
    def of_part(part: Part, x: jax.Array) -> jax.Array:
        if names := part.axes.get("m"):
            over = " and ".join(map(repr, names))
            warn_once(
                f"jaxops.{op}: XLA has split the rows over the mesh axis {over}, and cannot split this kernel: each "
                "device gathers all rows. Call it inside jax.shard_map; for experts in FP8 also jaxops.nn.MoE with "
                "expert_axis."
            )
        return x

    text = "m" + "." * (len(x.shape) - 1)
    return partitioned(of_part, (x,), (text,), text, split="m")


# Nothing is kept for the gradient.
_watched = differentiable(_watch, lambda op, x: (_watched(op, x), ()), lambda op, _, dx: (dx,), static=1)


class _Rule:
    """What one call's operands and results allow."""

    def __init__(self, call: Callable, operands: Names, results: Names, split: str):
        self.call, self.operands, self.results, self.split = call, operands, results, split
        count = itertools.count()
        # Each axis that is never split is a factor of its own.
        named = [
            [[c if c in split else f"whole{next(count)}" for c in text] for text in x] for x in (operands, results)
        ]
        self.text = " -> ".join(", ".join(" ".join(array) for array in arrays) for arrays in named)
        whole = tuple(name for arrays in named for array in arrays for name in array if len(name) > 1)
        summed = tuple(c for c in split if c in "".join(operands) and c not in "".join(results))
        self.factors = {"reduction_factors": summed, "need_replication_factors": whole}

    def axes(self, mesh: Mesh, arrays: Sequence[Any]) -> dict[str, Names]:
        """The mesh axes over which each letter is split: those of the first array that has some left."""
        taken: set[str] = set()
        found: dict[str, Names] = dict.fromkeys(self.split, ())
        for letter in self.split:
            for text, x in zip(self.operands + self.results, arrays, strict=False):
                names = _names(x.sharding, text.find(letter)) if letter in text else ()
                size = x.shape[text.find(letter)] if names else 0
                count = math.prod(mesh.shape[name] for name in names)
                each = 1 if letter == self.split[0] else ALIGNED
                if names and not taken & set(names) and size % (count * each) == 0:
                    found[letter] = names
                    taken |= set(names)
                    break
        return found

    def infer(self, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> tuple:
        mesh = _mesh_of(mesh, operands)
        axes = self.axes(mesh, operands)
        return tuple(NamedSharding(mesh, _spec(text, axes)) for text in self.results)

    def partition(self, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> tuple:
        mesh = _mesh_of(mesh, operands)
        axes = self.axes(mesh, (*operands, *results))
        sums = [_Sum.of(mesh, text, axes, x) for text, x in zip(self.results, results, strict=True)]
        rows = axes[self.split[0]]

        def local(*leaves: jax.Array) -> tuple:
            if rows:
                leaves = tuple(self._own_offsets(leaves, lax.axis_index(rows)))
            outs = jax.tree.leaves(self.call(Part(axes, several=True), *leaves))
            return tuple(each.add(x).astype(result.dtype) for each, x, result in zip(sums, outs, results, strict=True))

        placed = [NamedSharding(mesh, _spec(text, axes)) for text in self.operands]
        return mesh, local, tuple(NamedSharding(mesh, each.spec) for each in sums), tuple(placed)

    def _own_offsets(self, leaves: Sequence[jax.Array], device: jax.Array) -> list[jax.Array]:
        letter = self.split[0]
        count = next(
            x.shape[text.find(letter)] for text, x in zip(self.operands, leaves, strict=True) if letter in text
        )
        first = device.astype("int32") * count
        return [
            jax.numpy.clip(x - first, 0, count) if text == "#" else x
            for text, x in zip(self.operands, leaves, strict=True)
        ]


class _Sum:
    """How a result's parts are added: over the mesh axes `over`; those of `scattered`, by the result's axis, leave each
    device a slice, as it is wanted."""

    def __init__(self, over: Names, scattered: dict[int, Names], spec: P):
        self.over, self.scattered, self.spec = over, scattered, spec

    @classmethod
    def of(cls, mesh: Mesh, text: str, axes: dict[str, Names], result: Any) -> "_Sum":
        over = tuple(name for letter, names in axes.items() if letter not in text for name in names)
        spec, scattered = list(_spec(text, axes)), {}
        for i, own in enumerate(spec):
            names = _names(result.sharding, i)
            count = math.prod(mesh.shape[name] for name in names)
            if own is None and names and set(names) <= set(over) and result.shape[i] % count == 0:
                spec[i] = scattered[i] = names
        return cls(over, scattered, P(*spec))

    def add(self, x: jax.Array) -> jax.Array:
        for i, names in self.scattered.items():
            x = lax.psum_scatter(x, names, scatter_dimension=i, tiled=True)
        done = {name for names in self.scattered.values() for name in names}
        rest = tuple(name for name in self.over if name not in done)
        return lax.psum(x, rest) if rest else x


def _names(sharding: Any, axis: int) -> Names:
    """The mesh axes over which an array's axis is split."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    names = spec[axis] if axis < len(spec) else None
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _spec(text: str, axes: dict[str, Names]) -> P:
    return P(*(axes.get(letter) or None for letter in text))


def _mesh_of(mesh: Mesh, operands: Sequence[Any]) -> Mesh:
    """JAX knows no mesh where no array of the program has one: then nothing is split."""
    if not mesh.empty:
        return mesh
    devices = sorted(operands[0].sharding.device_set, key=lambda device: device.id)
    return Mesh(np.array(devices), ("devices",))


_split = Primitive("partitioned")
_split.multiple_results = True


@_split.def_impl
def _run(*leaves, plain: Callable, **_: Any) -> Any:
    return plain(*leaves)


@_split.def_abstract_eval
def _types(*_, calls: tuple, **__: Any) -> Any:
    return calls[0].out_avals


def _lower(ctx: Any, *values, plain: Callable, calls: tuple, **_: Any) -> Any:
    # An exported program has no partitioner of this process. JAX itself takes `plain` where there is one device.
    exported = ctx.module_context.lowering_parameters.for_export
    return mlir.lower_fun(plain if exported else jaxpr_as_fun(calls[0]), multiple_results=True)(ctx, *values)


mlir.register_lowering(_split, _lower)
batching.primitive_batchers[_split] = lambda leaves, mapped, *, batched, **_: batched(leaves, mapped)
