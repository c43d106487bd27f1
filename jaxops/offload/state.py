"""Optimizer state that stays in pinned host memory: a step brings it to the device piece by piece, updates the piece's parameters, and takes it back."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxops._lib.checks import check_integer
from jaxops.offload.rowwise import check_rows

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_MOST_PIECES = 64  # where the caller names none: more would be small copies, for memory that no longer counts


def offload_state(state: Any, *, min_bytes: int = 1 << 20) -> Any:
    """The same tree with its large arrays in pinned host memory, each device's part with that device's host: shardings stay as they are.

    Inside `jax.jit` too. On a CPU this changes no place, only the arrays' memory kind.

    >>> import jax, jax.numpy as jnp
    >>> from jaxops.offload import offload_state
    >>> state = offload_state({"count": jnp.zeros((), jnp.int32), "mu": jnp.zeros((8, 256, 256))})
    >>> jax.tree.map(lambda x: x.sharding.memory_kind, state)
    {'count': 'device', 'mu': 'pinned_host'}

    Args:
      state: any tree; a leaf that is no `jax.Array` stays as it is.
      min_bytes: of a whole array, over all devices; smaller ones stay where they are, as scalars do.

    Returns:
      A tree of state's structure.

    Raises:
      ValueError: min_bytes < 0.
      TypeError: min_bytes is no integer.
    """
    check_integer("min_bytes", min_bytes, 0)

    def place(x):
        if not isinstance(x, jax.Array) or x.ndim == 0 or x.size * x.dtype.itemsize < min_bytes:
            return x
        return jax.device_put(x, _HOST if isinstance(x, Tracer) else x.sharding.with_memory_kind("pinned_host"))

    return jax.tree.map(place, state)


@dataclasses.dataclass(frozen=True)
class Streamed:
    """An optimizer made by `streamed`, which describes both methods."""

    tx: Any
    pieces: int | None

    def init(self, params: Any) -> Any:
        """`tx.init(params)` through `offload_state`, one parameter after the other: the device never holds more of it. Call it outside `jax.jit`."""
        layout = _find_layout(jax.eval_shape(self.tx.init, params), params)
        arrays, scalars, moments = layout.params.flatten_up_to(params), [], []
        for k in range(len(arrays)):
            scalars, of_one = layout.split(
                self.tx.init(layout.params.unflatten([p if j == k else None for j, p in enumerate(arrays)]))
            )
            moments.append(jax.block_until_ready(offload_state(of_one[k])))
        return layout.join(scalars, moments)

    def apply(self, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        """A step: the new (params, state), each array where it was. Call it inside `jax.jit`, with params and state donated."""
        layout = _find_layout(state, params)
        _check_update(self.tx, layout, grads, state, params)
        scalars, moments = layout.split(state)
        grads, params = (layout.params.flatten_up_to(x) for x in (grads, params))
        pieces = self.pieces or _fewest_bytes([x for x in jax.tree.leaves(moments) if _can_be_cut(x)])
        rows = [
            max((x.shape[0] // pieces for x in jax.tree.leaves(of_one) if _can_be_cut(x)), default=0)
            for of_one in moments
        ]  # a piece's

        def update(spans, params, here):
            new, here, after = _update(
                self.tx, layout, scalars, _take_each(grads, spans), _take_each(params, spans), here
            )
            return _put_each(params, new, spans), here, after

        # What is not cut, and the last rows of what pieces does not divide.
        spans = [_rest(p, n * pieces) for p, n in zip(params, rows, strict=True)]
        moments, here = _fetch_each(moments, spans)
        params, here, after = update(spans, params, here)
        moments = _put_each(moments, here, spans)
        if any(rows):
            params, moments = _stream(update, pieces, rows, params, moments)
        return layout.params.unflatten(params), layout.join(after, moments)


def streamed(tx: Any, *, pieces: int | None = None) -> Streamed:
    """An optax optimizer whose state lives in pinned host memory: AdamW's, in float32, is twice as large as its parameters.

    A step cuts the state into pieces along the arrays' first axis, where models stack their layers. While one piece goes back to the host the next one comes,
    in both directions at once; parameters and the host's arrays are written in place. The device holds about two pieces.

    >>> import jax, jax.numpy as jnp, optax
    >>> from jaxops.offload import streamed
    >>> params = {"kernel": jnp.ones((8, 256, 256)), "bias": jnp.zeros((8, 256))}
    >>> optimizer = streamed(optax.adamw(1e-3), pieces=8)
    >>> state = optimizer.init(params)
    >>> step = jax.jit(optimizer.apply, donate_argnums=(0, 1))
    >>> params, state = step(params, state, grads=jax.tree.map(jnp.ones_like, params))

    What is donated must come back in the order in which it went in, as here or in one tree that is given and returned: `jax.jit` pairs donated arrays with
    results by shape alone, and would write parameters over moments, on the host.

    There is no `update` that returns updates: they would be one more array for each parameter. tx sees a piece at a time, so it must be elementwise, at
    least along the first axis (Adam(W), Lion, momentum, RMSprop; schedules; weight decay, its mask by path or by rank: a piece keeps both). apply proves it of
    tx.update's jaxpr, and refuses what mixes rows or parameters, or counts rows (norms, means, sort, cumsum). What looks at a whole gradient comes before,
    outside:

        grads, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())

    The rows that are left of an array which `pieces` does not divide are one piece more. Arrays on the device, as small ones are, stay there. Over several
    devices the first axis must not be the one that is split.

    Args:
      tx: has `init(params)` and `update(grads, state, params)`, as an `optax.GradientTransformation`.
      pieces: the number of layers, or a divisor of it. By default the number up to 64 with which the device holds the least.

    Returns:
      `init(params)` gives the state, a tree as tx's own; `apply(params, state, grads)` the new (params, state). grads has the parameters' structure.

    Raises:
      ValueError: pieces < 1. From apply: a state of other parameters, or tx.update is not elementwise along the first axis, or
        changes shapes or dtypes.
      TypeError: tx has no init or no update; pieces is no integer.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(
            f"tx is a {type(tx).__name__}; pass an optax.GradientTransformation, such as optax.adamw(1e-3)."
        )
    if pieces is not None:
        pieces = check_integer("pieces", pieces, 1)
    return Streamed(tx, pieces)


def _stream(update: Callable, pieces: int, rows: list[int], params: list, moments: list) -> tuple[list, list]:
    """Every piece's update. A piece comes while the one before it goes."""

    def piece(i):
        return [(i * n, n) for n in rows]

    def step(i, carry):
        params, moments, here = carry
        params, done, _ = update(piece(i), params, here)
        moments, coming = _fetch_each(moments, piece(i + 1))
        return params, _put_each(moments, done, piece(i)), coming

    # The last piece stands outside: where a row is not linear in the loop's index (a minimum, say), XLA copies by a kernel and not by a copy engine.
    params, moments, here = lax.fori_loop(0, pieces - 1, step, (params, *_fetch_each(moments, piece(0))))
    params, done, _ = update(piece(pieces - 1), params, here)
    return params, _put_each(moments, done, piece(pieces - 1))


# A span is some of a parameter's rows: (the first, how many). A scalar, and what is no array, is one row, which every update sees and one writes. A parameter
# without rows in an update is there with none, [0, ...]: trees, paths and ranks stay what they are.


def _rest(p: Any, start: int) -> tuple[int, int]:
    """All rows from start on."""
    return start, p.shape[0] - start if _is_stack(p) else 1


def _take(x: jax.Array, span: tuple) -> jax.Array:
    if not _is_stack(x):
        return x
    return (
        lax.dynamic_slice_in_dim(x, *span, allow_negative_indices=False)
        if span[1]
        else jnp.zeros((0, *x.shape[1:]), x.dtype)
    )


def _take_each(of_parameters: list, spans: list) -> list:
    return [jax.tree.map(functools.partial(_take, span=span), x) for x, span in zip(of_parameters, spans, strict=True)]


def _put_each(of_parameters: list, new: list, spans: list) -> list:
    def put(x, new, start):
        new = jax.device_put(new, _HOST) if _on_host(x) else new
        return lax.dynamic_update_slice_in_dim(x, new, start, 0, allow_negative_indices=False) if _is_stack(x) else new

    return [
        jax.tree.map(functools.partial(put, start=start), x, y) if n else x
        for x, y, (start, n) in zip(of_parameters, new, spans, strict=True)
    ]


def _fetch_each(moments: list, spans: list) -> tuple[list, list]:
    """(moments, their rows on the device)."""

    def fetch(x, span):
        rows = _take(x, span)
        if not (span[1] and _is_stack(x)):
            return x, rows
        # Read, then write: without the barrier XLA copies the whole host array in every iteration, to keep what is read from what is written. One barrier an
        # array, not one for all: so an array's rows go to the host while the next array's come.
        return lax.optimization_barrier((x, jax.device_put(rows, _DEVICE) if _on_host(x) else rows))

    arrays, tree = jax.tree.flatten(moments)
    pairs = list(
        map(fetch, arrays, [span for of_one, span in zip(moments, spans, strict=True) for _ in jax.tree.leaves(of_one)])
    )
    return tree.unflatten([x for x, _ in pairs]), tree.unflatten([rows for _, rows in pairs])


def _on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == _HOST


def _is_stack(x: Any) -> bool:
    return len(getattr(x, "shape", ())) > 0


def _can_be_cut(x: jax.Array) -> bool:
    return _on_host(x) and _is_stack(x)


def _fewest_bytes(arrays: list[jax.Array]) -> int:
    """Into how many pieces the arrays are cut for the device to hold the least of them: a piece, and the rows that are left over."""
    held = lambda pieces: sum(
        (x.shape[0] // pieces + x.shape[0] % pieces) * math.prod(x.shape[1:]) * x.dtype.itemsize for x in arrays
    )
    return min(range(1, _MOST_PIECES + 1), key=held)


def _is_empty(x: Any) -> bool:
    """A node without children."""
    structure = jax.tree.structure(x)
    return structure.num_nodes == 1 and structure.num_leaves == 0


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How a state is made of trees like the parameters' ("moments") and scalars.

    Attributes:
      params: the parameters' structure. What holds no array counts as a leaf: None, or what optax puts in place of a masked parameter.
      state: the state's, with a leaf for each tree of moments.
      is_moment: of each of these leaves.
    """

    params: Any
    state: Any
    is_moment: tuple[bool, ...]

    def split(self, state: Any) -> tuple[list, list]:
        """(scalars, a tuple of moments for each parameter)."""
        parts = self.state.flatten_up_to(state)
        trees = [self.params.flatten_up_to(x) for x, m in zip(parts, self.is_moment, strict=True) if m]
        return [x for x, m in zip(parts, self.is_moment, strict=True) if not m], [
            tuple(t[k] for t in trees) for k in range(self.params.num_leaves)
        ]

    def join(self, scalars: list, moments: list) -> Any:
        trees = iter([self.params.unflatten([of_one[j] for of_one in moments]) for j in range(sum(self.is_moment))])
        rest = iter(scalars)
        return self.state.unflatten([next(trees if m else rest) for m in self.is_moment])


def _find_layout(state: Any, params: Any) -> _Layout:
    arrays, tree = jax.tree.flatten(params, is_leaf=_is_empty)

    def is_moment(x):
        if jax.tree.structure(x, is_leaf=_is_empty) != tree:
            return False
        return all(
            leaf.shape == getattr(p, "shape", None)
            for part, p in zip(tree.flatten_up_to(x), arrays, strict=True)
            for leaf in jax.tree.leaves(part)
        )

    for path, x in jax.tree.leaves_with_path(state, is_leaf=is_moment):
        if not is_moment(x) and (x.shape != () or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} is {x.dtype}{list(x.shape)}, neither a number nor in a tree with the parameters' structure and shapes: "
                "pass init(params) of the same parameters. A transformation that keeps other arrays (optax.adafactor, optax.add_noise) is not elementwise."
            )
    parts, whole = jax.tree.flatten(state, is_leaf=is_moment)
    return _Layout(tree, whole, tuple(map(is_moment, parts)))


def _update(
    tx: Any, layout: _Layout, scalars: list, grads: list, params: list, moments: list
) -> tuple[list, list, list]:
    """(params, moments, scalars) after tx.update and optax.apply_updates, for the rows given."""
    updates, state = tx.update(
        layout.params.unflatten(grads), layout.join(scalars, moments), layout.params.unflatten(params)
    )
    params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, layout.params.flatten_up_to(updates))
    scalars, moments = layout.split(state)
    return params, moments, scalars


def _check_update(tx: Any, layout: _Layout, grads: Any, state: Any, params: Any) -> None:
    """What tx.update returns has the structure, shapes and, the state, dtypes of what it was given; and it is elementwise, at least along the first axis."""
    if jax.tree.structure(grads) != jax.tree.structure(params):
        raise ValueError(
            f"grads have the structure {jax.tree.structure(grads)}, but params {jax.tree.structure(params)}: they must be equal."
        )
    update = lambda params, state, grads: tx.update(grads, state, params)
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type), (params, state, grads)
    )
    jaxpr, results = jax.make_jaxpr(update, return_shape=True)(*types)
    for name, old, new in zip(("updates", "state"), types, results, strict=False):
        if jax.tree.structure(old) != jax.tree.structure(new):
            raise ValueError(
                f"tx.update returns {name} with the structure {jax.tree.structure(new)}; it must be {jax.tree.structure(old)}."
            )
        for (path, x), y in zip(jax.tree.leaves_with_path(old), jax.tree.leaves(new), strict=True):
            if x.shape != y.shape or (name == "state" and x.dtype != y.dtype):
                was, now = (f"{z.dtype}{list(z.shape)}" for z in (x, y))
                raise ValueError(
                    f"tx.update makes {name}{jax.tree_util.keystr(path)} {now}; it must be {was}. If only the dtype differs, cast the gradients to the "
                    "parameters', or call init with the parameters in float32."
                )
    check_rows(update, jaxpr, types, _stacks(layout, state, params))


def _stacks(layout: _Layout, state: Any, params: Any) -> tuple[Any, Any, Any]:
    """Trees like (params, state, grads), with the parameter's path in place of each array that is cut as it is, and "" in place of the others: scalars, and
    what has no rows to cut."""
    paths = [f"params{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(params, is_leaf=_is_empty)]
    named = lambda path, x: jax.tree.map(lambda leaf: path if _is_stack(leaf) and leaf.shape[0] else "", x)
    scalars, moments = layout.split(state)
    of_params = layout.params.unflatten(map(named, paths, layout.params.flatten_up_to(params)))
    return of_params, layout.join(named("", scalars), list(map(named, paths, moments))), of_params
