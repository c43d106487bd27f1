"""The portable backend: loops over blocks of rows, which skip what no row sees. Memory is that of a block's scores."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.symbolic import least
from jaxops.ops.packed_attention.plan import Arrays, Spec

# Instead of a masked score: with -inf, a row without keys and its gradients are NaN.
_LOW = float(jnp.finfo(jnp.float32).min)
EXACT_BELOW = 2.0**20  # where float32 numbers are an eighth apart


class Rows(NamedTuple):
    """Queries [t, K, G, H] with their runs of keys [t], of which a backward also has out, dout and lse [K, G, t]."""

    q: jax.Array
    first: jax.Array
    end: jax.Array
    out: jax.Array | None = None
    dout: jax.Array | None = None
    lse: jax.Array | None = None


def forward_xla(spec: Spec, block: int | None, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """(out [T, N, V], lse float32 [N, T]: the logarithm of each row's sum of exponentials).

    block: rows of queries and of keys in a step; None for all pairs at once, without a loop, for JAX to differentiate.
    """
    rows, k, v = _without_others(arrays)
    T, N, _ = arrays.q.shape
    if block is None:
        out, lse = _finish(*_step(spec, rows, k, v, 0, _before(arrays, T)))
    else:
        out, lse = _forward_in_blocks(spec, block, rows, k, v, _before(arrays, least(block, T)))
    return out[:T].reshape(T, N, v.shape[2]).astype(arrays.q.dtype), lse[:, :, :T].reshape(N, T)


def backward_xla(
    spec: Spec, block: int, arrays: Arrays, out: jax.Array, lse: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv), in the dtype of q, k and v."""
    rows, k, v = _without_others(arrays)
    sees = (rows.end > rows.first)[:, None, None, None]
    T, K, G, H = rows.q.shape
    out, dout = (x.reshape(T, K, G, x.shape[2]) for x in (out, dout))
    rows = rows._replace(out=out, dout=jnp.where(sees, dout, 0), lse=lse.reshape(K, G, T))
    dq, dk, dv = _backward_in_blocks(spec, block, rows, k, v)
    return (
        dq[:T].reshape(T, K * G, H).astype(arrays.q.dtype),
        dk.astype(arrays.k.dtype),
        dv.astype(arrays.v.dtype),
    )


def along_rows(arrays: Arrays, out: jax.Array, dout: jax.Array) -> jax.Array:
    """float32 [N, T]: of each row the sum of out * dout, 0 in rows that see nothing, whose dout may be NaN."""
    sees = (arrays.first < arrays.end)[:, None, None]
    return jnp.sum(jnp.where(sees, out.astype(jnp.float32) * dout.astype(jnp.float32), 0), axis=2).T


def _without_others(arrays: Arrays) -> tuple[Rows, jax.Array, jax.Array]:
    """The operands, zero in rows outside: zero times NaN is NaN."""
    q, k, v, first, end, bounds, _ = arrays
    (T, N, H), (S, K, _) = q.shape, k.shape
    row = jnp.arange(S, dtype=jnp.int32)
    inside = ((bounds[2] <= row) & (row < bounds[3]))[:, None, None]
    q = jnp.where((first < end)[:, None, None], q, 0).reshape(T, K, N // K, H)
    return Rows(q, first, end), jnp.where(inside, k, 0), jnp.where(inside, v, 0)


def _products(spec: Spec, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision=spec.precision, preferred_element_type=jnp.float32)


def _scores(
    spec: Spec, rows: Rows, k: jax.Array, start: jax.Array | int
) -> tuple[jax.Array, jax.Array | float, jax.Array]:
    """float32 [K, G, t, s] of key rows `start` and on, the cap's slope, and where they count, bool [1, 1, t, s]."""
    key = start + jnp.arange(k.shape[0], dtype=jnp.int32)[None, :]
    mask = ((rows.first[:, None] <= key) & (key < rows.end[:, None]))[None, None]
    scores, slope = spec.capped(_products(spec, "tkgh,skh->kgts", rows.q, k))
    return scores, slope, mask


def _before(arrays: Arrays, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `_step` adds to first: the sinks, of which one has an exponential and no value."""
    (_, N, _), (_, K, V) = arrays.q.shape, arrays.v.shape
    shape, sinks = (K, N // K, rows), arrays.sinks
    top = jnp.float32(_LOW) if sinks is None else jnp.maximum(sinks, _LOW).reshape(K, N // K, 1)
    total = jnp.full(shape, 0.0 if sinks is None else 1.0, jnp.float32)
    return jnp.broadcast_to(top, shape), total, jnp.zeros((*shape, V), jnp.float32)


def _step(spec: Spec, rows: Rows, k: jax.Array, v: jax.Array, start: jax.Array | int, carry):
    """(largest score [K, G, t], sum of exponentials [K, G, t], their product with the values [K, G, t, V]) of the key
    rows `start` and on, added to those of `carry`."""
    scores, _, mask = _scores(spec, rows, k, start)
    top = jnp.maximum(jnp.max(jnp.where(mask, scores, _LOW), axis=3), carry[0])
    p = jnp.exp(jnp.where(mask, scores - top[..., None], _LOW))
    total, mixed = jnp.sum(p, axis=3), _products(spec, "kgts,skh->kgth", p.astype(v.dtype), v)
    before = jnp.exp(carry[0] - top)
    return top, before * carry[1] + total, before[..., None] * carry[2] + mixed


def exact_lse(lse: jax.Array, nat: float = 1.0) -> jax.Array:
    """NaN for logarithms so large that exp(score - lse), of which gradients are made, would be off by more than 6 %.

    nat: e's logarithm in the same base.
    """
    return jnp.where(jnp.abs(lse) < nat * EXACT_BELOW, lse, jnp.nan)


def _finish(top: jax.Array, total: jax.Array, mixed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(out float32 [t, K, G, V], lse [K, G, t]); both are 0 for a row without keys and sink."""
    some = total > 0
    total = jnp.where(some, total, 1)
    return jnp.moveaxis(mixed / total[..., None], 2, 0), jnp.where(some, exact_lse(top + jnp.log(total)), 0)


def _gradients(
    spec: Spec, rows: Rows, k: jax.Array, v: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32 dq [t, K, G, H], and of key rows `start` and on dk [s, K, H] and dv [s, K, V]."""
    q, _, _, out, dout, lse = rows
    assert out is not None
    assert dout is not None
    assert lse is not None
    scores, slope, mask = _scores(spec, rows, k, start)
    p = jnp.exp(jnp.where(mask, scores - lse[..., None], _LOW))
    along = jnp.einsum("tkgh,tkgh->kgt", out.astype(jnp.float32), dout.astype(jnp.float32))
    ds = (spec.scale * slope * p * (_products(spec, "tkgh,skh->kgts", dout, v) - along[..., None])).astype(k.dtype)
    return (
        _products(spec, "kgts,skh->tkgh", ds, k),
        _products(spec, "kgts,tkgh->skh", ds, q),
        _products(spec, "kgts,tkgh->skh", p.astype(v.dtype), dout),
    )


def _whole(x: jax.Array, axis: int, rows: int) -> jax.Array:
    """x, padded with zeros to whole blocks of rows. Of a symbolic size JAX can compare this form, and not `%`."""
    more = rows * -(-x.shape[axis] // rows) - x.shape[axis]
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])


def _in_blocks(x: jax.Array, axis: int, rows: int) -> jax.Array:
    """[..., T, ...] -> [T / rows, ..., rows, ...], padded with zeros."""
    x = _whole(x, axis, rows)
    x = x.reshape(*x.shape[:axis], x.shape[axis] // rows, rows, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _blocks_of(rows: Rows, size: int) -> Rows:
    last = {"lse": 2}  # the axis of rows, elsewhere the first one
    of = {name: _in_blocks(x, last.get(name, 0), size) for name, x in rows._asdict().items() if x is not None}
    return Rows(**of)


def _steps(rows: Rows, block: int) -> tuple[jax.Array, jax.Array]:
    """The blocks of keys that some of the rows see: first and end."""
    sees = rows.first < rows.end
    end = jnp.max(rows.end)
    return jnp.min(jnp.where(sees, rows.first, end)) // block, (end + block - 1) // block


def _cut(x: jax.Array, i: jax.Array, block: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, i * block, block)


def _forward_in_blocks(
    spec: Spec, block: int, rows: Rows, k: jax.Array, v: jax.Array, before: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """The online softmax of Milakov and Gimelshein 2018 (arXiv:1805.02867), as in FlashAttention. before: of
    `_before`."""
    (_, K, G, _), size, block = rows.q.shape, least(block, rows.q.shape[0]), least(block, k.shape[0])
    k, v = (_whole(x, 0, block) for x in (k, v))
    before, _ = vary_together(before, (rows, k))

    def one(some: Rows):
        step = lambda i, carry: _step(spec, some, _cut(k, i, block), _cut(v, i, block), i * block, carry)
        return _finish(*lax.fori_loop(*_steps(some, block), step, before))

    out, lse = lax.map(one, _blocks_of(rows, size))
    return out.reshape(-1, K, G, v.shape[2]), jnp.moveaxis(lse, 0, 2).reshape(K, G, -1)


def _backward_in_blocks(
    spec: Spec, block: int, rows: Rows, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    S, size, block = k.shape[0], least(block, rows.q.shape[0]), least(block, k.shape[0])
    k, v = (_whole(x, 0, block) for x in (k, v))
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    (sums, none), _ = vary_together(((zeros(k.shape), zeros(v.shape)), zeros((size, *rows.q.shape[1:]))), (rows, k))

    def one(sums: tuple[jax.Array, jax.Array], some: Rows):
        def step(i: jax.Array, carry):
            dq, sums = carry
            more, *of_keys = _gradients(spec, some, _cut(k, i, block), _cut(v, i, block), i * block)
            new = [_cut(x, i, block) + each for x, each in zip(sums, of_keys, strict=True)]
            place = lambda x, each: lax.dynamic_update_slice_in_dim(x, each, i * block, 0)
            return dq + more, tuple(map(place, sums, new))

        dq, sums = lax.fori_loop(*_steps(some, block), step, (none, sums))
        return sums, dq

    (dk, dv), dq = lax.scan(one, sums, _blocks_of(rows, size))
    return dq.reshape(-1, *dq.shape[2:]), dk[:S], dv[:S]
