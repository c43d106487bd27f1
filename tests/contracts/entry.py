"""An entry of the list of ops and layers."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Dims = dict[str, int]
Arguments = dict[str, Any]  # arrays by name, or trees of arrays


@dataclasses.dataclass(frozen=True)
class Op:
    """A public op or layer, with all that a rule needs.

    Attributes:
      name: the public name; of a layer with "nn." before it.
      call: of the arguments, and of what a way to run it says (backend or plan, precision).
      shapes: of sizes, the arguments' shapes and dtypes.
      sizes: small ones, by name; every one of them may be 0 and 1.
      reference: of the arguments, the results in float32 and plain jnp; its gradients are JAX's own.
      ways: options of `call` by way to run it: "xla", "interpret" (Pallas kernels in Pallas' interpreter), and on a GPU
        "gpu" (the same kernels, compiled) and "triton".
      wrt: the arguments that have gradients.
      local: the arguments of which each device has its own where tokens are sharded; the others are replicated.
      integers: of a random number generator and sizes, the arguments that say which row is whose.
      outside: of the arguments, masks of the values that must not be read: by argument, and a list for the results
        (None for a result that is all inside).
      passes: rows outside are not zero in the results: they pass through.
      expected: instead of `reference` and its gradients by JAX: (results, gradients by argument) of arguments and
        cotangents.
      module: where its Plan, Problem and make_plan are; None without a plan.
      multiplies: whether jax_default_matmul_precision changes what it computes.
      sharded: the call is a `jax.shard_map` of its own, which cannot stand inside of another one.
      large: sizes with which an FP8 array, or the largest array, has more than 2**31 elements, and options of `call`.
    """

    name: str
    call: Callable[..., Any]
    shapes: Callable[[Dims], Arguments]
    sizes: Dims
    ways: dict[str, dict[str, Any]]
    reference: Callable[[Arguments], Any] | None = None
    wrt: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    integers: Callable[[np.random.Generator, Dims], Arguments] = lambda rng, sizes: {}
    outside: Callable[[Arguments], tuple[Arguments, list]] | None = None
    passes: bool = False
    expected: Callable[[Arguments, list], tuple[Any, Arguments]] | None = None
    module: types.ModuleType | None = None
    multiplies: bool = False
    sharded: bool = False
    large: tuple[tuple[Dims, dict[str, Any]], ...] = ()

    def __str__(self):
        return self.name


EXACT = {"precision": "highest"}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "int32")


def offsets(rng: np.random.Generator, M: int, G: int) -> np.ndarray:
    """[G + 1], unaligned. One of several groups is empty; rows before the first and behind the last are in none."""
    found = np.sort(rng.integers(M // 8, max(M // 8, M - M // 8) + 1, G + 1))
    found[G // 2] = found[(G + 1) // 2] = found[G // 2] if G < 2 else found[G // 2 - 1]
    return found.astype(np.int32)


def outside_of(offsets, M: int) -> np.ndarray:
    """[M, 1] bool"""
    row = np.arange(M)
    return ((row < offsets[0]) | (row >= offsets[-1]))[:, None]


def ways_of(
    plan_of: Callable[[str], Any], runs: tuple[str, ...] = ("xla", "interpret", "gpu"), **how
) -> dict[str, dict[str, Any]]:
    """Explicit plans, whose tiles are smaller than the sizes here."""
    return {run: {"plan": plan_of(run)} | how for run in runs}


def rows_outside(
    names: tuple[str, ...], results: tuple[bool, ...], offsets_name: str = "offsets"
) -> Callable[[Arguments], tuple[Arguments, list]]:
    """Rows of these arguments, and of the results that are True."""

    def outside(a: Arguments) -> tuple[Arguments, list]:
        mask = outside_of(a[offsets_name], a[names[0]].shape[0])
        return dict.fromkeys(names, mask), [mask if there else None for there in results]

    return outside
