"""Runs the entries of the list: arguments, results and gradients, and the expected values."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compare import assert_close
from tests.contracts.entry import Arguments, Op, reference, whole
from tests.contracts.layers import LAYERS
from tests.contracts.ops import OPS
from tests.ops.fp8_matmul.cases import kind_of, options_of

EVERYTHING = {op.name: op for op in [*OPS, *LAYERS]}
ON_A_GPU = ("gpu", "triton")


WAYS = ("xla", "interpret", "gpu", "triton")


def cases(ways: tuple[str, ...] = WAYS, where: Callable[[Op, str], bool] = lambda op, way: True) -> list:
    """(name, way) of each op and layer, as a test's parameters; a way that needs a GPU is marked.

    What calls ops is run on the portable backend alone: the ops' own cases run their kernels.
    """
    return [
        pytest.param(op.name, way, id=f"{op.name}-{way}", marks=pytest.mark.gpu if way in ON_A_GPU else ())
        for op in EVERYTHING.values() for way in op.ways
        if way in ways and not is_kernel_of_layer(op, way) and where(op, way)
    ]  # fmt: skip


def is_kernel_of_layer(op: Op, way: str) -> bool:
    """ragged_dot and ragged_dot_general are grouped_matmul's kernels under another name."""
    return (op in LAYERS or op.name.startswith("ragged_dot")) and way == "interpret"


def small(op: Op, seed: int = 0, **sizes: int) -> Arguments:
    """Arguments in numpy: normal numbers, and offsets or routings."""
    sizes = op.sizes | sizes
    rng = np.random.default_rng([seed, zlib.crc32(op.name.encode())])
    given = op.integers(rng, sizes)
    made = {name: given.get(name, shapes) for name, shapes in op.shapes(sizes).items()}
    return jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, made
    )


def is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1


@functools.cache
def _results_of(name: str, sizes: tuple) -> list:
    op = EVERYTHING[name]
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), small(op, **dict(sizes)))
    return jax.tree.leaves(jax.eval_shape(lambda a: op.call(a, **op.ways["xla"]), given))


def cotangents_of(op: Op, seed: int = 0, **sizes: int) -> list:
    """Of the results that have gradients, in numpy."""
    if not op.wrt:
        return []
    rng = np.random.default_rng([seed, 7])
    return [rng.normal(size=x.shape).astype(x.dtype) for x in _results_of(op.name, tuple(sizes.items())) if is_float(x)]


def spoiled(op: Op, arguments: Arguments, cotangents: list) -> tuple[Arguments, list]:
    """With NaN in all values that must not be read."""
    if op.outside is None:
        return arguments, cotangents
    of_arguments, of_results = op.outside(arguments)
    bad = {
        name: np.where(mask, np.nan, arguments[name]).astype(arguments[name].dtype)
        for name, mask in of_arguments.items()
    }
    pairs = zip(cotangents, of_results, strict=True) if cotangents else ()
    return arguments | bad, [c if mask is None else np.where(mask, np.nan, c).astype(c.dtype) for c, mask in pairs]


def parts(op: Op, arguments: Arguments) -> tuple[Arguments, Arguments]:
    """(those that have gradients, the others)"""
    return {name: arguments[name] for name in op.wrt}, {name: x for name, x in arguments.items() if name not in op.wrt}


def both(f, held: Arguments, others: Arguments, cotangents: list) -> tuple[Any, Arguments]:
    """(results, gradients by argument) of f of arguments."""
    if not held:
        return f(others), {}

    def smooth(held):
        results = f(held | others)
        return [x for x in jax.tree.leaves(results) if is_float(x)], results

    _, vjp, results = jax.vjp(smooth, held, has_aux=True)
    return results, vjp(cotangents)[0]


def everything(
    op: Op, way: str, held: Arguments, others: Arguments, cotangents: list, how: dict | None = None
) -> tuple[Any, Arguments]:
    """how: instead of what the way says."""
    return both(functools.partial(op.call, **(op.ways[way] if how is None else how)), held, others, cotangents)


def run(op: Op, way: str, arguments: Arguments, cotangents: list) -> tuple[Any, Arguments]:
    """In numpy. Ops are not under jit; layers and collectives are, or JAX would compile each operation by itself."""
    if way == "triton" and "backend" in op.ways[way]:
        options_of(way)  # skips elsewhere than on Hopper
    f = program(op.name, way) if op in LAYERS or op.sharded else functools.partial(everything, op, way)
    return jax.tree.map(np.asarray, f(*parts(op, arguments), cotangents))


@functools.cache
def _reference(name: str):
    return jax.jit(functools.partial(both, EVERYTHING[name].reference))


def wanted_of_each(op: Op, every: list[tuple[Arguments, list]]) -> list:
    """`wanted`, of all (arguments, cotangents) in one program."""
    if op.expected is not None:
        return [op.expected(*given) for given in every]
    given = [(*parts(op, arguments), cotangents) for arguments, cotangents in every]
    return jax.jit(lambda given: [both(op.reference, *one) for one in given])(given)


def wanted(op: Op, arguments: Arguments, cotangents: list) -> tuple[Any, Arguments]:
    if op.expected is not None:
        return op.expected(arguments, cotangents)
    return _reference(op.name)(*parts(op, arguments), cotangents)


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}") if x.size else x


def check(op: Op, way: str, got, want, scale: float = 10) -> None:
    """Integers and FP8 are the same to the bit, the rest to the rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want) or len(jax.tree.leaves(got)) == len(
        jax.tree.leaves(want)
    )
    limits = (
        kind_of(way, "float32") if "fp8" in op.name.lower() else {"kind": "bfloat16" if way == "triton" else "float32"}
    )
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = f"{op.name}{jax.tree_util.keystr(path)}"
        if is_float(g):
            assert_close(g, w, **{"scale": scale} | limits, name=name)
        else:
            assert g.dtype == w.dtype, f"{name} is {g.dtype}, wanted {w.dtype}"
            np.testing.assert_array_equal(bits(g), bits(w), err_msg=name)


def check_outside(op: Op, arguments, results, gradients, spoilt) -> None:
    """Values outside change no bit; results and gradients outside are zero, unless the op passes them through."""
    of_arguments, of_results = op.outside(arguments) if op.outside else ({}, [])
    of_results = [*of_results, *[None] * (len(jax.tree.leaves(results)) - len(of_results))]
    leaves = list(zip(jax.tree.leaves(results), jax.tree.leaves(spoilt[0]), of_results, strict=True))
    for argument in op.wrt:
        of_leaves = [of_arguments.get(argument)] * len(jax.tree.leaves(gradients[argument]))
        leaves += zip(
            jax.tree.leaves(gradients[argument]), jax.tree.leaves(spoilt[1][argument]), of_leaves, strict=True
        )
    for clean, got, mask in leaves:
        inside = np.broadcast_to(True if mask is None else ~mask, clean.shape)
        np.testing.assert_array_equal(bits(got)[inside], bits(clean)[inside])
        assert op.passes or not got[~inside].any()


def stacked(trees: list):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


@functools.cache
def program(name: str, way: str, options: tuple = ()):
    """`everything` of parts and cotangents, compiled once a shape."""
    op = EVERYTHING[name]
    return jax.jit(functools.partial(everything, op, way, how=op.ways[way] | dict(options)))


@functools.cache
def _reference_with(name: str, options: tuple):
    return jax.jit(functools.partial(both, lambda arguments: reference(name, **whole(arguments), **dict(options))))


def compare(name: str, way: str, arguments: Arguments, kind: str = "float32", scale: float = 1, **options: Any) -> None:
    """Results and gradients are the reference's, in the dtypes of the rows and of the arguments, whatever
    stands outside; there they are zero, and so are the gradients of empty groups. One program a shape and options.

    Args:
      options: of the call. A plan or a precision instead of the way's.
    """
    op = EVERYTHING[name]
    exact = _reference_with(name, tuple((key, x) for key, x in options.items() if key not in ("plan", "precision")))
    shapes = jax.eval_shape(functools.partial(op.call, **op.ways[way] | options), arguments)
    rng = np.random.default_rng(7)
    cotangents = [rng.normal(size=x.shape).astype(x.dtype) for x in jax.tree.leaves(shapes)]
    given, outside = spoiled(op, arguments, cotangents)
    got = jax.tree.map(np.asarray, program(name, way, tuple(options.items()))(*parts(op, given), outside))
    _, of_results = spoiled(op, arguments, [np.zeros(x.shape, np.float32) for x in cotangents])
    clean = [np.where(np.isnan(x), 0, np.asarray(c, np.float32)) for x, c in zip(of_results, cotangents, strict=True)]
    want = exact(*parts(op, jax.tree.map(lambda x: x.astype(np.float32) if is_float(x) else x, arguments)), clean)
    assert {x.dtype for x in jax.tree.leaves(got[0])} == {arguments[op.local[0]].dtype} or op.name == "grouped_wgrad"
    for (path, x), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_close(x, w, kind, jax.tree_util.keystr(path), scale)
    dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
    assert dtypes(got[1]) == dtypes(parts(op, arguments)[0])
    check_outside(op, arguments, *got, got)
    check_empty_groups(op, arguments, got[1])


def check_empty_groups(op: Op, arguments: Arguments, gradients: Arguments) -> None:
    """Their gradients are exactly zero: of weights, whose first axes are the groups, one array or several."""
    empty = np.diff(arguments["group_offsets"]) == 0
    for argument in set(op.wrt) - set(op.local) - {"accumulate_into"}:
        matrices = [matrix for weights in jax.tree.leaves(gradients[argument]) for matrix in weights]
        groups = np.resize(empty, max(len(matrices), len(empty)))  # of each of several biases
        assert not any(matrix.any() for matrix, none in zip(matrices, groups, strict=bool(matrices)) if none)
