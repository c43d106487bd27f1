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
from jaxops.offload.elementwise import check_update

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
        arrays, tree = jax.tree.flatten(params)
        leaves: dict[Any, Any] = {}  # of the state, by path: scalars are the same for each parameter
        for k in range(max(1, len(arrays))):
            only = tree.unflatten([p if j == k else None for j, p in enumerate(arrays)])
            state = jax.block_until_ready(offload_state(self.tx.init(only)))
            leaves |= dict(jax.tree.leaves_with_path(state))
        whole = jax.eval_shape(self.tx.init, params)
        return jax.tree.map_with_path(lambda path, _: leaves[path], whole)

    def apply(self, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        """A step: the new (params, state), each array in its old memory. Call it inside `jax.jit`, donating both."""
        check_update(self.tx, params, state, grads)
        on_host = [x for x in jax.tree.leaves(state) if jnp.ndim(x) and _on_host(x)]
        pieces = self.pieces or _fewest_bytes(on_host)
        # An array is streamed with all that has its shape: a parameter, its gradient and its moments.
        shapes = {x.shape for x in on_host}
        rows = lambda x: x.shape[0] // pieces if x.shape in shapes else 0  # of a piece
        piece: Callable[[Any], Span] = lambda i: lambda x: (i * rows(x), rows(x))
        remainder: Span = lambda x: (pieces * rows(x), x.shape[0] - pieces * rows(x))

        def update(span: Span, arrays: Any, fetched: Any) -> tuple[Any, Any, Any]:
            """((parameters with the rows of span updated, state), those rows of the state, new values of scalars)."""
            params, state = arrays
            params_here, grads_here = (jax.tree.map(functools.partial(_rows, span), x) for x in (params, grads))
            updates, after = self.tx.update(grads_here, fetched, params_here)
            new = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params_here, updates)
            return (_write(span, params, new), state), after, (new, after)

        def fetch(span: Span, arrays: Any) -> tuple[Any, Any]:
            params, state = arrays
            leaves, tree = jax.tree.flatten(state)
            pairs = [_fetch(span, x) for x in leaves]
            return (params, tree.unflatten([x for x, _ in pairs])), tree.unflatten([rows for _, rows in pairs])

        def write(span: Span, arrays: Any, new: Any) -> tuple[Any, Any]:
            return arrays[0], _write(span, arrays[1], new)

        # First what is not streamed: other arrays, and the rows that the division into pieces leaves over.
        arrays, fetched = fetch(remainder, (params, state))
        arrays, done, scalars = update(remainder, arrays, fetched)
        arrays = write(remainder, arrays, done)
        if any(rows(x) for x in on_host):

            def step(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                """The next piece is fetched while the last one is written back."""
                arrays, fetched = carry
                arrays, done, _ = update(piece(i), arrays, fetched)
                arrays, fetched = fetch(piece(i + 1), arrays)
                return write(piece(i), arrays, done), fetched

            # The last piece is outside the loop: with a row index that is not linear in the loop's counter, such as a
            # minimum, XLA copies by a kernel instead of a copy engine.
            arrays, fetched = lax.fori_loop(0, pieces - 1, step, fetch(piece(0), arrays))
            arrays, done, _ = update(piece(pieces - 1), arrays, fetched)
            arrays = write(piece(pieces - 1), arrays, done)
        # All updates saw the old scalars, such as a count of steps.
        return jax.tree.map(lambda x, new: x if jnp.ndim(x) else new, arrays, scalars)


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

    tx sees a piece at a time, so it must be elementwise: Adam(W), Lion, momentum, RMSprop, schedules, weight decay with
    masks by path or rank. apply proves that from the jaxpr of tx.update, and raises for transformations that mix
    elements (norms, means, sort, cumsum) or count rows. Apply those to the gradients:

        grads, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())

    If `pieces` does not divide an array's first axis, the remaining rows are one more piece. Arrays on the device, such
    as small ones, stay there. Over several devices the first axis must not be sharded.

    Args:
      tx: has `init(params)` and `update(grads, state, params)`, as an `optax.GradientTransformation`.
      pieces: the number of layers, or a divisor of it; by default the number up to 64 that needs least device memory.

    Returns:
      `init(params)` returns the state, a tree like tx's; `apply(params, state, grads)` the new (params, state).

    Raises:
      ValueError: pieces < 1; from apply, a state of other parameters, or a tx.update that is not elementwise or that
        changes shapes or dtypes.
      TypeError: tx has no init or no update; pieces is no integer.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(f"tx is {type_name(tx)}; pass an optax.GradientTransformation, e.g. optax.adamw(1e-3).")
    return Streamed(tx, None if pieces is None else check_integer("pieces", pieces, 1))


# (first row, number of rows) of an array. Scalars are part of every update. An array with an empty span enters an
# update with shape [0, ...]: trees, paths and ranks do not change.
Span = Callable[[Any], tuple[Any, int]]


def _rows(span: Span, x: Any) -> Any:
    if not jnp.ndim(x):
        return x
    if not span(x)[1]:
        return jnp.zeros((0, *x.shape[1:]), x.dtype)
    return lax.dynamic_slice_in_dim(x, *span(x), allow_negative_indices=False)


def _write(span: Span, arrays: Any, new: Any) -> Any:
    """The arrays with these rows; scalars stay."""

    def write(x: Any, new: Any) -> Any:
        if not jnp.ndim(x) or not span(x)[1]:
            return x
        new = jax.device_put(new, _HOST) if _on_host(x) else new
        return lax.dynamic_update_slice_in_dim(x, new, span(x)[0], 0, allow_negative_indices=False)

    return jax.tree.map(write, arrays, new)


def _fetch(span: Span, x: Any) -> tuple[Any, Any]:
    """(x, its rows on the device)."""
    rows = _rows(span, x)
    if not jnp.ndim(x) or not span(x)[1]:
        return x, rows
    # Without the barrier between read and write, XLA copies the whole host array in every iteration. One barrier an
    # array, so that one array's rows are written back while the next array's are fetched.
    return lax.optimization_barrier((x, jax.device_put(rows, _DEVICE) if _on_host(x) else rows))


def _on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == _HOST


def _fewest_bytes(arrays: list[jax.Array]) -> int:
    """The number of pieces for which the device holds least: a piece and the remaining rows."""
    row_bytes = [math.prod(x.shape[1:]) * x.dtype.itemsize for x in arrays]
    held = lambda n: sum((x.shape[0] // n + x.shape[0] % n) * row for x, row in zip(arrays, row_bytes, strict=True))
    return min(range(1, _MOST_PIECES + 1), key=held)
