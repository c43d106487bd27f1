"""Adds up the parts of sequences that took several tiles, in order of rows: deterministic, without atomics."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.launch_pallas import launch_named
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.masked_pallas import load, store
from jaxops.ops.adaln.rows_pallas import ceil_div, run_bounds

# Few columns a program, so that one sequence of all rows has many programs, which add _MANY parts a step, the last ones
# _FEW a step.
_COLUMNS, _MANY, _FEW = 64, 64, 16


def _sums_kernel(ref: dict, *, names: tuple[str, ...], T: int, rows: int):
    parts, offsets_ref, sequences_ref = [ref[f"parts_{name}"] for name in names], ref["offsets"], ref["sequences"]
    B, D, starts = offsets_ref.shape[0] - 1, parts[0].shape[1], sequences_ref.shape[0]
    program, columns = pl.program_id(0), pl.program_id(1) * _COLUMNS + jnp.arange(_COLUMNS, dtype=jnp.int32)[None, :]
    by_sequence = starts >= B
    sequence = program if by_sequence else plgpu.load(sequences_ref.at[program])
    inside = (sequence >= 0) & (sequence < B)
    sequence = jnp.clip(sequence, 0, B - 1)
    lo, hi = run_bounds(offsets_ref, sequence + 1, T)
    first = ceil_div(lo, rows)
    tiles = jnp.maximum(ceil_div(hi, rows) - first, 0)  # after the head
    has_head = (first * rows > lo).astype(jnp.int32)
    # With more sequences than multiples of `rows`, a program takes the sequence whose first multiple is its own.
    mine = inside if by_sequence else inside & (first == program)

    @pl.when(mine & (tiles + has_head > 1))
    def _():
        columns_in = columns < D

        def add(begin, height, steps, sums):
            def step(i, blocks):
                row = begin + i * height + jnp.arange(height, dtype=jnp.int32)[:, None]
                mask = (row < tiles) & columns_in
                return [b + load(part, (first + row, columns), mask) for b, part in zip(blocks, parts, strict=True)]

            blocks = lax.fori_loop(0, steps, step, [jnp.zeros((height, _COLUMNS), jnp.float32) for _ in parts])
            return [s + jnp.sum(b, axis=0, keepdims=True) for s, b in zip(sums, blocks, strict=True)]

        head, whole = jnp.broadcast_to(starts + sequence, (1, 1)), tiles // _MANY
        sums = [load(part, (head, columns), jnp.broadcast_to(has_head > 0, (1, 1)) & columns_in) for part in parts]
        sums = add(0, _MANY, whole, sums)
        sums = add(whole * _MANY, _FEW, ceil_div(tiles - whole * _MANY, _FEW), sums)
        for name, s in zip(names, sums, strict=True):
            store(ref[f"finished_{name}"], (jnp.broadcast_to(sequence, (1, 1)), columns), s, columns_in)


def finish_sums(
    offsets: jax.Array, results: dict[str, jax.Array], names: tuple[str, ...], *, T: int, rows: int, interpret: bool
) -> dict[str, jax.Array]:
    """d<name> [B, D] of each name, with the rows of sequences of several tiles added up from parts_<name> [tiles, D].

    Args:
      results: of the backward kernel: d<name>, parts_<name> and sequences, the sequence of each row that is a multiple
        of `rows`, int32 [cdiv(T, rows)].
    """
    done: dict[str, Any] = {f"d{name}": results[f"d{name}"] for name in names}
    parts = {f"parts_{name}": results[f"parts_{name}"] for name in names}
    (B, D), starts = next(iter(done.values())).shape, results["sequences"].shape[0]
    finished = launch_named(
        functools.partial(_sums_kernel, names=names, T=T, rows=rows),
        {"offsets": offsets, "sequences": results["sequences"]} | parts | done,
        {
            f"finished_{name}": out_struct(x.shape, x.dtype, like=x)
            for name, x in zip(names, done.values(), strict=True)
        },
        grid=(min(B, starts), pl.cdiv(D, _COLUMNS)),
        warps=4,
        interpret=interpret,
        name="adaln_sums",
        aliases={f"d{name}": f"finished_{name}" for name in names},
    )
    return {f"d{name}": finished[f"finished_{name}"] for name in names}
