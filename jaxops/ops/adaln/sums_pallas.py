"""Adds up the parts of sequences that took several tiles, in the order of their rows: no atomics, the same bits every time."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops.ops.adaln.rows_pallas import ceil_div, run_bounds

# Few columns a program are many programs where one sequence holds all rows; that one's parts go by in steps of _MANY, the last ones in steps of _FEW.
_COLUMNS, _MANY, _FEW = 64, 64, 16


def _sums_kernel(offsets_ref, sequences_ref, *refs, T: int, rows: int):
    parts, out = (
        refs[: len(refs) // 3],
        refs[-(len(refs) // 3) :],
    )  # between them the results so far, which are the results' own memory
    B, D, starts = offsets_ref.shape[0] - 1, parts[0].shape[1], sequences_ref.shape[0]
    program, columns = pl.program_id(0), pl.program_id(1) * _COLUMNS + jnp.arange(_COLUMNS, dtype=jnp.int32)[None, :]
    by_sequence = starts >= B
    sequence = program if by_sequence else plgpu.load(sequences_ref.at[program])
    inside = (sequence >= 0) & (sequence < B)
    sequence = jnp.clip(sequence, 0, B - 1)
    lo, hi = run_bounds(offsets_ref, sequence + 1, T)
    first = ceil_div(lo, rows)
    tiles = jnp.maximum(ceil_div(hi, rows) - first, 0)  # behind the head
    has_head = (first * rows > lo).astype(jnp.int32)
    # With more sequences than multiples of `rows`, each sequence that holds one is found through the first.
    mine = inside if by_sequence else inside & (first == program)

    @pl.when(mine & (tiles + has_head > 1))
    def _():
        columns_in = columns < D

        def load(ref, row, row_in):
            return plgpu.load(ref.at[row, columns], mask=row_in & columns_in, other=0.0)

        def add(begin, height, steps, sums):
            def step(i, blocks):
                row = begin + i * height + jnp.arange(height, dtype=jnp.int32)[:, None]
                return [b + load(ref, first + row, row < tiles) for b, ref in zip(blocks, parts, strict=True)]

            blocks = lax.fori_loop(0, steps, step, [jnp.zeros((height, _COLUMNS), jnp.float32) for _ in parts])
            return [s + jnp.sum(b, axis=0, keepdims=True) for s, b in zip(sums, blocks, strict=True)]

        head, whole = jnp.broadcast_to(starts + sequence, (1, 1)), tiles // _MANY
        sums = [load(ref, head, jnp.broadcast_to(has_head > 0, (1, 1))) for ref in parts]
        sums = add(0, _MANY, whole, sums)
        sums = add(whole * _MANY, _FEW, ceil_div(tiles - whole * _MANY, _FEW), sums)
        for s, ref in zip(sums, out, strict=True):
            plgpu.store(ref.at[jnp.broadcast_to(sequence, (1, 1)), columns], s.astype(ref.dtype), mask=columns_in)


def finish_sums(
    offsets: jax.Array,
    sequences: jax.Array,
    parts: list[jax.Array],
    done: list[jax.Array],
    *,
    T: int,
    rows: int,
    interpret: bool,
) -> list[jax.Array]:
    """done[B, D] with the rows of sequences of several tiles filled in from parts[tiles, D], which lie as `rows_pallas.Tile` says.

    Args:
      sequences: [cdiv(T, rows)] int32, the sequence of each row that is a multiple of `rows`.
    """
    n, (B, D) = len(parts), done[0].shape
    finished = launch(
        functools.partial(_sums_kernel, T=T, rows=rows),
        offsets,
        sequences,
        *parts,
        *done,
        out=[out_struct(x.shape, x.dtype, like=x) for x in done],
        grid=(min(B, sequences.shape[0]), pl.cdiv(D, _COLUMNS)),
        warps=4,
        interpret=interpret,
        name="adaln_sums",
        aliases={2 + n + i: i for i in range(n)},
    )
    return list(finished)
