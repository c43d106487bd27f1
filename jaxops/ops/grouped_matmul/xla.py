"""The portable backend: a loop over row tiles with dynamic slices, without a copy of lhs for each group. CPU, TPU, and
the benchmarks' plain-XLA side."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.arrays.symbolic import is_symbolic
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.grouped_matmul.modalities import Shapes, parts_of, shapes_of

_SYMBOLIC = 128  # rows of a tile if M is symbolic (jax.export); arrays are padded by as many, so that a tile fits


def _tile_rows(M: int, G: int) -> int:
    """Rows of a tile: about the mean group's, a power of two from 16 to 512 (2-core CPU, benchmarks/results/cpu)."""
    return _SYMBOLIC if is_symbolic(M) else min(512, max(16, power_of_2(M // max(G, 1))), M)


def _padded(x: jax.Array, M) -> jax.Array:
    """x[M, columns], padded if it may be shorter than a tile."""
    return jnp.pad(x, ((0, _SYMBOLIC), (0, 0))) if is_symbolic(M) else x


def _sum_dtype(dtype) -> jnp.dtype:
    """The accumulator's dtype: float32 or int32, or the operands' own if that is wider."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.promote_types(dtype, jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32)
    return dtype if dtype.itemsize > 4 else jnp.dtype("float32")


@traced_once("M", "bm")
def _tiles(offsets: jax.Array, M: int, bm: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each group: the number of tiles up to its end, the row where tile 0 would start if all tiles were the group's,
    and its end. Offsets are clipped to [0, M]: those that break the contract give wrong rows, never an access out of
    bounds."""
    bounds = jnp.clip(offsets, 0, M)
    lo, hi = bounds[:-1], jnp.maximum(bounds[:-1], bounds[1:])
    count = lax.div(hi - lo + jnp.int32(bm - 1), jnp.int32(bm))
    behind = jnp.cumsum(count, dtype=jnp.int32)
    return behind, lo - bm * (behind - count), hi


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False, allow_negative_indices=False)


def _rows(x: jax.Array, first: jax.Array, bm: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, first, bm, allow_negative_indices=False)


def _for_each_tile(offsets: jax.Array, M: int, body, init: jax.Array) -> jax.Array:
    """Folds `body(group, slice start, rows_in[bm, 1], carry)` over the tiles inside the groups."""
    bm = _tile_rows(M, offsets.shape[0] - 1)
    behind, first, end = _tiles(offsets, M, bm)

    def step(t, carry):
        g = jnp.sum(behind <= t, dtype=jnp.int32)
        start = _at(first, g) + bm * t
        # Clamped as dynamic_slice would do; the mask follows.
        slice_start = start if is_symbolic(M) else jnp.minimum(start, M - bm)
        row = slice_start + jnp.arange(bm, dtype=jnp.int32)
        return body(g, slice_start, bm, ((start <= row) & (row < _at(end, g)))[:, None], carry)

    return lax.fori_loop(jnp.int32(0), behind[-1], step, init)


def _fwd(lhs, rhs, bias, offsets, *, transpose_rhs: bool, precision: lax.PrecisionLike, out_dtype) -> jax.Array:
    """Of one array of weights."""
    M, N = lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    contract = (((1,), (1 if transpose_rhs else 0,)), ((), ()))

    lhs, sums = _padded(lhs, M), _sum_dtype(lhs.dtype)

    def body(g, first, bm, mine, out):
        rows = _rows(lhs, first, bm)
        tile = lax.dot_general(rows, _at(rhs, g), contract, precision=precision, preferred_element_type=sums)
        if bias is not None:
            tile += _at(bias, g).astype(sums)[None, :]
        tile = jnp.where(mine, tile.astype(out_dtype), _rows(out, first, bm))
        return lax.dynamic_update_slice_in_dim(out, tile, first, 0, allow_negative_indices=False)

    init, _ = vary_together(jnp.zeros((lhs.shape[0], N), out_dtype), lhs)
    return _for_each_tile(offsets, M, body, init)[:M]


def _wgrad(lhs, dout, accumulator, offsets, *, precision: lax.PrecisionLike, out_dtype) -> jax.Array:
    """Of one array of weights."""
    M, G, sums = lhs.shape[0], offsets.shape[0] - 1, _sum_dtype(lhs.dtype)
    lhs, dout = _padded(lhs, M), _padded(dout, M)

    def body(g, first, bm, mine, out):
        rows = jnp.where(mine, _rows(lhs, first, bm), 0)
        douts = jnp.where(mine, _rows(dout, first, bm), 0)
        tile = lax.dot_general(rows, douts, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=sums)
        return lax.dynamic_update_index_in_dim(out, _at(out, g) + tile, g, 0, allow_negative_indices=False)

    init = jnp.zeros((G, lhs.shape[1], dout.shape[1]), sums) if accumulator is None else accumulator.astype(sums)
    init, _ = vary_together(init, lhs)
    return _for_each_tile(offsets, M, body, init).astype(out_dtype)


def fwd_xla(
    lhs, rhs, bias, offsets, *, out: jax.ShapeDtypeStruct, transpose_rhs: bool, precision: lax.PrecisionLike
) -> jax.Array:
    """As `fwd_pallas` of all modalities: a product each, added to its own rows and columns of the result."""
    settings = {"transpose_rhs": transpose_rhs, "precision": precision, "out_dtype": out.dtype}
    if len(rhs) == 1:
        return _fwd(lhs, rhs[0], bias, offsets, **settings)
    shapes = shapes_of(rhs, transpose_rhs)
    result, _ = vary_together(jnp.zeros(out.shape, out.dtype), lhs)
    for part in parts_of(shapes):
        (first, end), (_, K, N) = part.groups, shapes[part.number]
        product = _fwd(lhs[:, :K], rhs[part.number], None, offsets[first : end + 1], **settings)
        result = lax.dynamic_update_slice_in_dim(result, result[:, :N] + product, 0, 1)
    return result


def wgrad_xla(
    lhs, dout, accumulator, offsets, *, shapes: Shapes, precision: lax.PrecisionLike, out_dtype
) -> list[jax.Array]:
    """As `wgrad_pallas` of all modalities."""
    gradients = [vary_together(jnp.zeros(shape, out_dtype), offsets)[0] for shape in shapes]
    for part in parts_of(shapes):
        (first, end), (_, K, N) = part.groups, shapes[part.number]
        settings = {"precision": precision, "out_dtype": out_dtype}
        gradients[part.number] = _wgrad(lhs[:, :K], dout[:, :N], accumulator, offsets[first : end + 1], **settings)
    return gradients
