"""An entry of the list of ops and layers: what the op's describe.py says of it, and a small sample of its operands."""

import dataclasses
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np

import jaxops
from jaxops.described import functions

Dims = dict[str, int]
Arguments = dict[str, Any]  # arrays by name, or trees of arrays
FUNCTIONS = {function.name: function for function in functions()}
EXACT = {"precision": "highest"}


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

    @property
    def pallas(self) -> bool:
        """Whether its plans have Pallas kernels."""
        return self.module is not None and "interpret" in self.ways


def described(
    name: str, sizes: Dims, shapes: Callable[[Dims], Arguments], plan_of: Callable[[str], Any] | None = None,
    options: dict[str, Any] | None = None, **more: Any,
) -> Op:  # fmt: skip
    """An op as its describe.py describes it. An argument with a path, as "routing.weights", is a part of another one.

    Args:
      plan_of: "xla", "interpret" or "gpu" -> an explicit plan, whose tiles are smaller than the sizes.
      options: of every call.
      more: fields of `Op` that are not by the description.
    """
    options, known = options or {}, inspect.signature(FUNCTIONS[name].function).parameters
    exact, problem = EXACT if "precision" in known else {}, FUNCTIONS[name].problem
    ways = {"xla": {}} if plan_of is None else {run: {"plan": plan_of(run)} | exact for run in RUNS}
    fields: dict[str, Any] = {
        "call": lambda a, **how: getattr(jaxops, name)(**whole(a), **options, **how),
        "reference": None if "expected" in more else lambda a: reference(name, **options, **whole(a)),
        "ways": ways,
        "wrt": FUNCTIONS[name].wrt,
        "module": problem and importlib.import_module(type(problem).__module__.removesuffix(".plan")),
        "multiplies": not known.keys().isdisjoint(("precision", "recipe")),
    }
    return Op(name, shapes=shapes, sizes=sizes, **fields | more)


RUNS = ("xla", "interpret", "gpu")


def reference(name: str, **given: Any) -> Any:
    """The results of an op's reference, with defaults for what is not given."""
    parameters = inspect.signature(FUNCTIONS[name].function).parameters.values()
    return FUNCTIONS[name].reference({p.name: p.default for p in parameters} | given)


def whole(a: Arguments) -> Arguments:
    """With parts in their place: {"routing": r, "routing.weights": w} is {"routing": r with w}."""
    found = {name: x for name, x in a.items() if "." not in name}
    for name in a.keys() - found.keys():
        owner, _, field = name.partition(".")
        found[owner] = dataclasses.replace(found[owner], **{field: a[name]})
    return found


def offsets(rng: np.random.Generator, M: int, G: int) -> np.ndarray:
    """[G + 1], unaligned. One of several groups is empty; rows before the first and behind the last are in none."""
    found = np.sort(rng.integers(M // 8, max(M // 8, M - M // 8) + 1, G + 1))
    found[G // 2] = found[(G + 1) // 2] = found[G // 2] if G < 2 else found[G // 2 - 1]
    return found.astype(np.int32)


def random_offsets(name: str, rows: str, groups: str) -> Callable[[np.random.Generator, Dims], Arguments]:
    """`Op.integers` of an op with groups or sequences: the argument, and the sizes of rows and groups."""
    return lambda rng, d: {name: offsets(rng, d[rows], d[groups])}


def outside_of(offsets, M: int) -> np.ndarray:
    """[M, 1] bool"""
    row = np.arange(M)
    return ((row < offsets[0]) | (row >= offsets[-1]))[:, None]


def rows_outside(
    offsets_name: str, names: tuple[str, ...], results: tuple[bool, ...]
) -> Callable[[Arguments], tuple[Arguments, list]]:
    """Rows of these arguments, and of the results that are True."""

    def outside(a: Arguments) -> tuple[Arguments, list]:
        mask = outside_of(a[offsets_name], a[names[0]].shape[0])
        return dict.fromkeys(names, mask), [mask if there else None for there in results]

    return outside
