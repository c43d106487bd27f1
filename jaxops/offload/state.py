"""Optimizer state in pinned host memory: a step streams it through the device in pieces and writes it back."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxops._lib.arrays.checks import check_integer, type_name
from jaxops.offload.rowwise import check_rows

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_MOST_PIECES = 64  # by default: more pieces would be small copies, for memory that no longer matters


def offload_state(state: Any, *, min_bytes: int = 1 << 20) -> Any:
    """The same tree with its large arrays in pinned host memory, with unchanged shardings; also inside `jax.jit`.

    On a CPU only the arrays' memory kind changes.

    >>> import jax, jax.numpy as jnp
    >>> from jaxops.offload import offload_state
    >>> state = offload_state({"count": jnp.zeros((), jnp.int32), "mu": jnp.zeros((8, 256, 256))})
    >>> jax.tree.map(lambda x: x.sharding.memory_kind, state)
    {'count': 'device', 'mu': 'pinned_host'}

    Scalars, arrays below min_bytes (of the whole array) and leaves that are no `jax.Array` stay in their memory.
    ValueError or TypeError if min_bytes is negative or no integer.
    """
    check_integer("min_bytes", min_bytes, 0)

    def move(x):
        if not isinstance(x, jax.Array) or x.ndim == 0 or x.size * x.dtype.itemsize < min_bytes:
            return x
        return jax.device_put(x, _HOST if isinstance(x, Tracer) else x.sharding.with_memory_kind("pinned_host"))

    return jax.tree.map(move, state)


@dataclasses.dataclass(frozen=True)
class Streamed:
    """An optimizer made by `streamed`, which documents both methods."""

    tx: Any
    pieces: int | None

    def init(self, params: Any) -> Any:
        """`tx.init(params)` on the host, made parameter by parameter to save device memory.

        Call it outside `jax.jit`.
        """
        layout = _find_layout(jax.eval_shape(self.tx.init, params), params)
        arrays, scalars, moments = layout.params.flatten_up_to(params), [], []
        for k in range(len(arrays)):
            only = layout.params.unflatten([p if j == k else None for j, p in enumerate(arrays)])
            scalars, of_each = layout.split(self.tx.init(only))
            moments.append(jax.block_until_ready(offload_state(of_each[k])))
        return layout.join(scalars, moments)

    def apply(self, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        """A step: the new (params, state), each array in its old memory. Call it inside `jax.jit`, donating both."""
        layout = _find_layout(state, params)
        _check_update(self.tx, layout, grads, state, params)
        scalars, moments = layout.split(state)
        grads, params = (layout.params.flatten_up_to(x) for x in (grads, params))
        streamed = [[x for x in jax.tree.leaves(m) if _on_host(x) and _is_stack(x)] for m in moments]
        pieces = self.pieces or _fewest_bytes([x for of_one in streamed for x in of_one])
        rows = [max((x.shape[0] // pieces for x in of_one), default=0) for of_one in streamed]  # of a piece

        def update(spans, params, fetched):
            """(params with the rows of spans updated, those rows of the moments, scalars)."""
            grads_here, params_here = (layout.params.unflatten(_slice_each(x, spans)) for x in (grads, params))
            updates, after = self.tx.update(grads_here, layout.join(scalars, fetched), params_here)
            new = jax.tree.map(
                lambda p, u: (p + u).astype(p.dtype), *map(layout.params.flatten_up_to, (params_here, updates))
            )
            after, fetched = layout.split(after)
            return _write_each(params, new, spans), fetched, after

        # First the arrays that are not streamed, and the rows left over by the division into pieces.
        rest = [(n * pieces, p.shape[0] - n * pieces if _is_stack(p) else 1) for p, n in zip(params, rows, strict=True)]
        moments, fetched = _fetch_each(moments, rest)
        params, fetched, after = update(rest, params, fetched)
        moments = _write_each(moments, fetched, rest)
        if any(rows):
            params, moments = _stream(update, pieces, rows, params, moments)
        return layout.params.unflatten(params), layout.join(after, moments)


def streamed(tx: Any, *, pieces: int | None = None) -> Streamed:
    """An optax optimizer with its state in pinned host memory.

    A step streams the state in pieces along the arrays' first axis, along which models stack layers: while one is
    copied to the host the next is fetched. Parameters and host arrays are updated in place; the device holds
    about two pieces.

    >>> import jax, jax.numpy as jnp, optax
    >>> from jaxops.offload import streamed
    >>> params = {"kernel": jnp.ones((8, 256, 256)), "bias": jnp.zeros((8, 256))}
    >>> optimizer = streamed(optax.adamw(1e-3), pieces=8)
    >>> state = optimizer.init(params)
    >>> step = jax.jit(optimizer.apply, donate_argnums=(0, 1))
    >>> params, state = step(params, state, grads=jax.tree.map(jnp.ones_like, params))

    Return donated arrays in the order of the arguments, as here: `jax.jit` pairs donated arrays with results by shape
    alone, and would otherwise write parameters over moments on the host.

    tx sees a piece at a time, so it must be elementwise along the first axis: Adam(W), Lion, momentum, RMSprop,
    schedules, weight decay with masks by path or rank. apply proves that from the jaxpr of tx.update, and raises for
    transformations that mix or count rows or parameters (norms, means, sort, cumsum). Apply those to the gradients:

        grads, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())

    If `pieces` does not divide an array's first axis, the remaining rows are one more piece. Arrays on the device, such
    as small ones, stay there. Over several devices the first axis must not be sharded.

    Args:
      tx: has `init(params)` and `update(grads, state, params)`, as an `optax.GradientTransformation`.
      pieces: the number of layers, or a divisor of it; by default the number up to 64 that needs least device memory.

    Returns:
      `init(params)` returns the state, a tree like tx's; `apply(params, state, grads)` the new (params, state).

    Raises:
      ValueError: pieces < 1; from apply, a state of other parameters, or a tx.update that is not elementwise along the
        first axis, or changes shapes or dtypes.
      TypeError: tx has no init or no update; pieces is no integer.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(f"tx is {type_name(tx)}; pass an optax.GradientTransformation, e.g. optax.adamw(1e-3).")
    return Streamed(tx, None if pieces is None else check_integer("pieces", pieces, 1))


def _stream(update: Callable, pieces: int, rows: list[int], params: list, moments: list) -> tuple[list, list]:
    """Updates every piece. The next piece is fetched while the last one is written back."""
    piece = lambda i: [(i * n, n) for n in rows]

    def step(i, carry):
        params, moments, fetched = carry
        params, done, _ = update(piece(i), params, fetched)
        moments, fetched = _fetch_each(moments, piece(i + 1))
        return params, _write_each(moments, done, piece(i)), fetched

    # The last piece is outside the loop: with a row index that is not linear in the loop's counter, such as a minimum,
    # XLA copies by a kernel instead of a copy engine.
    params, moments, fetched = lax.fori_loop(0, pieces - 1, step, (params, *_fetch_each(moments, piece(0))))
    params, done, _ = update(piece(pieces - 1), params, fetched)
    return params, _write_each(moments, done, piece(pieces - 1))


# A span is (first row, number of rows) of one parameter. Scalars and other leaves are part of every update, and written
# by the update whose span has rows. A parameter with an empty span enters an update with shape [0, ...]: trees, paths
# and ranks do not change.


def _slice(x: jax.Array, span: tuple) -> jax.Array:
    if not _is_stack(x):
        return x
    if not span[1]:
        return jnp.zeros((0, *x.shape[1:]), x.dtype)
    return lax.dynamic_slice_in_dim(x, *span, allow_negative_indices=False)


def _slice_each(of_parameters: list, spans: list) -> list:
    return [jax.tree.map(functools.partial(_slice, span=s), x) for x, s in zip(of_parameters, spans, strict=True)]


def _write_each(of_parameters: list, new: list, spans: list) -> list:
    def write(x, new, start):
        new = jax.device_put(new, _HOST) if _on_host(x) else new
        return lax.dynamic_update_slice_in_dim(x, new, start, 0, allow_negative_indices=False) if _is_stack(x) else new

    return [
        jax.tree.map(functools.partial(write, start=start), x, y) if n else x
        for x, y, (start, n) in zip(of_parameters, new, spans, strict=True)
    ]


def _fetch_each(moments: list, spans: list) -> tuple[list, list]:
    """(moments, their rows on the device)."""

    def fetch(x, span):
        rows = _slice(x, span)
        if not (span[1] and _is_stack(x)):
            return x, rows
        # Without the barrier between read and write, XLA copies the whole host array in every iteration. One barrier an
        # array, so that one array's rows are written back while the next array's are fetched.
        return lax.optimization_barrier((x, jax.device_put(rows, _DEVICE) if _on_host(x) else rows))

    arrays, tree = jax.tree.flatten(moments)
    span_of = [span for of_one, span in zip(moments, spans, strict=True) for _ in jax.tree.leaves(of_one)]
    pairs = list(map(fetch, arrays, span_of))
    return tree.unflatten([x for x, _ in pairs]), tree.unflatten([rows for _, rows in pairs])


def _on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == _HOST


def _is_stack(x: Any) -> bool:
    return len(getattr(x, "shape", ())) > 0


def _fewest_bytes(arrays: list[jax.Array]) -> int:
    """The number of pieces for which the device holds least: a piece and the remaining rows."""
    row_bytes = [math.prod(x.shape[1:]) * x.dtype.itemsize for x in arrays]
    held = lambda n: sum((x.shape[0] // n + x.shape[0] % n) * row for x, row in zip(arrays, row_bytes, strict=True))
    return min(range(1, _MOST_PIECES + 1), key=held)


def _is_empty(x: Any) -> bool:
    """A node without children."""
    structure = jax.tree.structure(x)
    return structure.num_nodes == 1 and structure.num_leaves == 0


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A state as trees with the parameters' structure ("moments") and scalars."""

    params: Any  # the parameters' structure; nodes without arrays (None, optax's MaskedNode) count as leaves
    state: Any  # the state's structure, with each tree of moments as a leaf
    is_moment: tuple[bool, ...]  # for each of these leaves

    def split(self, state: Any) -> tuple[list, list]:
        """(scalars, a tuple of moments for each parameter)."""
        parts = list(zip(self.state.flatten_up_to(state), self.is_moment, strict=True))
        trees = [self.params.flatten_up_to(x) for x, is_moment in parts if is_moment]
        moments = [tuple(tree[k] for tree in trees) for k in range(self.params.num_leaves)]
        return [x for x, is_moment in parts if not is_moment], moments

    def join(self, scalars: list, moments: list) -> Any:
        trees = iter([self.params.unflatten([of_one[j] for of_one in moments]) for j in range(sum(self.is_moment))])
        rest = iter(scalars)
        return self.state.unflatten([next(trees if is_moment else rest) for is_moment in self.is_moment])


def _find_layout(state: Any, params: Any) -> _Layout:
    arrays, tree = jax.tree.flatten(params, is_leaf=_is_empty)

    def is_moment(x):
        if jax.tree.structure(x, is_leaf=_is_empty) != tree:
            return False
        parts = zip(tree.flatten_up_to(x), arrays, strict=True)
        return all(leaf.shape == getattr(p, "shape", None) for part, p in parts for leaf in jax.tree.leaves(part))

    for path, x in jax.tree.leaves_with_path(state, is_leaf=is_moment):
        if not is_moment(x) and (x.shape != () or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} is {x.dtype}{list(x.shape)}, neither a number nor in a tree with "
                "the "
                "parameters' structure and shapes: pass init(params) of the same parameters. A transformation that "
                "keeps "
                "other arrays (optax.adafactor, optax.add_noise) is not elementwise."
            )
    parts, whole = jax.tree.flatten(state, is_leaf=is_moment)
    return _Layout(tree, whole, tuple(map(is_moment, parts)))


def _check_update(tx: Any, layout: _Layout, grads: Any, state: Any, params: Any) -> None:
    """tx.update must keep structures, shapes and the state's dtypes, and be elementwise along the first axis."""
    structure = jax.tree.structure
    if structure(grads) != structure(params):
        raise ValueError(
            f"grads have the structure {structure(grads)}, but params {structure(params)}: pass equal ones."
        )
    update = lambda params, state, grads: tx.update(grads, state, params)
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type), (params, state, grads)
    )
    jaxpr, results = jax.make_jaxpr(update, return_shape=True)(*types)
    for name, old, new in zip(("updates", "state"), types, results, strict=False):
        if structure(old) != structure(new):
            raise ValueError(
                f"tx.update returns {name} of the structure {structure(new)}; it must be {structure(old)}."
            )
        for (path, x), y in zip(jax.tree.leaves_with_path(old), jax.tree.leaves(new), strict=True):
            if x.shape != y.shape or (name == "state" and x.dtype != y.dtype):
                was, now = (f"{z.dtype}{list(z.shape)}" for z in (x, y))
                raise ValueError(
                    f"tx.update makes {name}{jax.tree_util.keystr(path)} {now}; it must be {was}. If only the dtype "
                    "differs, cast the gradients to the parameters', or call init with the parameters in float32."
                )
    check_rows(update, jaxpr, types, _stacks(layout, state, params))


def _stacks(layout: _Layout, state: Any, params: Any) -> tuple[Any, Any, Any]:
    """Trees like (params, state, grads) with the parameter's path for each array with rows, and "" for other leaves."""
    paths = [f"params{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(params, is_leaf=_is_empty)]
    named = lambda path, x: jax.tree.map(lambda leaf: path if _is_stack(leaf) and leaf.shape[0] else "", x)
    scalars, moments = layout.split(state)
    of_params = layout.params.unflatten(map(named, paths, layout.params.flatten_up_to(params)))
    return of_params, layout.join(named("", scalars), list(map(named, paths, moments))), of_params
