"""The mainloops of products over ragged groups in Pallas kernels: rows times a matrix, and a group's rows times each
other."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.sums import steps_of_part
from jaxops._lib.pallas import masked_pallas as masked


def sums_over_columns(
    lhs_ref, rhs_refs, g, rows: tuple[jax.Array, jax.Array | None], j, *, tile: tuple[int, int], times,
    part: tuple[jax.Array, int] | None = None, transpose_rhs: bool = False, precision: lax.Precision,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """float32 [height, bn] for each of rhs_refs, arrays [G, K, N] ([G, N, K] with transpose_rhs) of one shape: rows
    [height] of lhs[M, K or more], times columns j * bn and on of rhs[g]. Columns past N are zeros, or NaN if the row
    holds NaN.

    Args:
      rows: indices from 0 to M - 1; and which of them are read, or None for all. Results of the others are zeros.
      tile: bn, bk.
      times: 1, or 0 for results of zeros.
      part: the sum is split into so many parts of whole steps; this is that number of them. None for all of it.
    """
    (bn, bk), (indices, rows_in), shape = tile, rows, rhs_refs[0].shape
    height = indices.shape[0]
    K, N = (shape[2], shape[1]) if transpose_rhs else shape[1:]
    cols_in = None if N % bn == 0 else j * bn + jnp.arange(bn, dtype=jnp.int32) < N

    def step(k, sums, k_in=None):
        ks = pl.ds(k * bk, bk)
        lhs_mask = None if rows_in is None else rows_in[:, None]
        rhs_mask = None if cols_in is None else cols_in[None, :]
        if k_in is not None:  # on both operands: numbers past K may be NaN
            lhs_mask = masked.both(lhs_mask, k_in[None, :])
            rhs_mask = k_in[:, None] if rhs_mask is None else k_in[:, None] & rhs_mask
        k_cols = k * bk + jnp.arange(bk, dtype=jnp.int32)
        a = masked.load(lhs_ref, (indices[:, None], k_cols[None, :]), lhs_mask)
        other = None if rhs_mask is None else 0.0
        mask, at = None if rhs_mask is None else jnp.broadcast_to(rhs_mask, (bk, bn)), (g, ks, pl.ds(j * bn, bn))
        if transpose_rhs:
            mask, at = None if mask is None else mask.T, (g, pl.ds(j * bn, bn), ks)
        bs = [plgpu.load(rhs_ref.at[at], mask=mask, other=other) for rhs_ref in rhs_refs]
        products = [plgpu.dot(a, b, trans_b=transpose_rhs, precision=precision) for b in bs]
        return tuple(acc + product for acc, product in zip(sums, products, strict=True))

    def last_step(k, sums):
        return step(k, sums, k * bk + jnp.arange(bk, dtype=jnp.int32) < K)

    full = K // bk
    first, end = 0, times * full
    if part is not None:
        number, parts = part
        first, steps = steps_of_part(pl.cdiv(K, bk), parts, number)
        end = jnp.minimum(first + steps, full)
        times = ((first <= full) & (full < first + steps)).astype(jnp.int32)  # of the last step
    sums = lax.fori_loop(first, end, step, (jnp.zeros((height, bn), jnp.float32),) * len(rhs_refs))
    if K % bk:
        sums = lax.fori_loop(full, full + times, last_step, sums)
    return sums


def sum_over_rows(
    lhs_ref,
    dout_ref,
    rows: tuple[jax.Array, jax.Array],
    i,
    j,
    *,
    sizes: tuple[int, int],
    tile: tuple[int, int, int],
    peel: bool,
    precision: lax.Precision,
) -> jax.Array:
    """float32 [bm, bn]: tile (i, j) of lhs[rows].T @ dout[rows], of lhs's first K columns and dout's first N; zeros
    past them.

    Args:
      rows: the first one, and the end. Rows from the end on, which may be NaN, are not multiplied.
      sizes: K, N.
      tile: bm, bn, bk.
      peel: whole steps run in a loop without row masks, the remaining rows in a masked step after it.
    """
    M, (K, N), (bm, bn, bk), (start, end) = lhs_ref.shape[0], sizes, tile, rows
    # Clips for the compiler, as in fwd_pallas.py. They change only the start of an empty group at M, which takes no
    # step.
    steps = jnp.clip((end - start + bk - 1) // bk, 0, pl.cdiv(M, bk))
    whole = jnp.clip((end - start) // bk, 0, M // bk)
    start = jnp.clip(start, 0, M - 1)
    i_in = None if K % bm == 0 else i * bm + jnp.arange(bm, dtype=jnp.int32) < K
    j_in = None if N % bn == 0 else j * bn + jnp.arange(bn, dtype=jnp.int32) < N

    def step(s, acc, rows_in=None):
        def load(ref, first, cols_in, width):
            mask = None if rows_in is None else jnp.broadcast_to(rows_in[:, None], (bk, width))
            if cols_in is not None:
                mask = jnp.broadcast_to(cols_in[None, :], (bk, width)) if mask is None else mask & cols_in[None, :]
            return plgpu.load(
                ref.at[pl.ds(start + s * bk, bk), pl.ds(first, width)], mask=mask, other=None if mask is None else 0.0
            )

        a, b = load(lhs_ref, i * bm, i_in, bm), load(dout_ref, j * bn, j_in, bn)
        return acc + plgpu.dot(a, b, trans_a=True, precision=precision)

    def masked_step(s, acc):  # the next group's rows may be NaN: masked on both operands
        return step(s, acc, start + s * bk + jnp.arange(bk, dtype=jnp.int32) < end)

    acc = jnp.zeros((bm, bn), jnp.float32)
    if not peel:
        return lax.fori_loop(0, steps, masked_step, acc)
    acc = lax.fori_loop(0, whole, step, acc)
    return lax.cond(steps > whole, functools.partial(masked_step, whole), lambda acc: acc, acc)
