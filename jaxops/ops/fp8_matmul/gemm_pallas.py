"""C = A @ B.T of FP8 operands as Pallas kernels lowered through Triton: for every GPU from Ada on, and the interpreter.

Triton compiles no FP8 wgmma from Pallas' dot, and takes no dot of two FP8 formats: the operands are converted to
bfloat16, which is exact, and multiplied. On Hopper gemm_triton.py is faster for FP8 by FP8; rows that are not quantized
have these kernels alone.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.costs import bytes_of
from jaxops._lib.fp8 import BLOCK
from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.schedule_pallas import schedule_groups, schedule_rows
from jaxops._lib.tiling import panel_order, tile_bound
from jaxops._lib.traced_once import traced_once
from jaxops._lib.work_list import COLUMNS, schedule_one
from jaxops.ops.fp8_matmul.operand import Operand, bytes_of_columns
from jaxops.ops.fp8_matmul.plan import Tiles


def _load_entry(schedule_ref, i: jax.Array, count: int) -> list[jax.Array]:
    """The first `count` columns of entry i of the work list."""
    return [plgpu.load(schedule_ref.at[n * (schedule_ref.shape[0] // COLUMNS) + i]) for n in range(count)]


@dataclasses.dataclass(frozen=True)
class Side:
    """The rows of one operand that a program multiplies; every row index is valid.

    Attributes:
      axis: of the result, 0 or 1.
      stack: (index in the stack,), or () without one.
      first, rows: the tile's first row, before it is clipped, and all rows.
    """

    axis: int
    values_ref: Any
    scales_ref: Any
    scaling: str
    stack: tuple[jax.Array, ...]
    first: jax.Array
    rows: jax.Array

    def load(self, k: jax.Array, k_in: jax.Array | None, dtype: Any) -> jax.Array:
        """[rows, 128] of step k in a half precision, zeros where k_in is false: memory past K may hold NaN."""
        columns = k * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        mask = None if k_in is None else jnp.broadcast_to(k_in[None, :], (self.rows.shape[0], BLOCK))
        at = self.values_ref.at[(*self.stack, self.rows[:, None], columns[None, :])]
        values = plgpu.load(at, mask=mask, other=None if mask is None else 0.0)
        if values.dtype.itemsize == 1 and dtype == jnp.bfloat16:
            # Through float16 and float32, exactly. Triton's cast from e5m2 to bfloat16 turns NaN into finite numbers
            # (H200, 2026-11-23, JAX 0.11.2); that from e4m3 has an instruction from float16 to bfloat16 for each
            # number, at an eighth of the rate of those from float32 (sm_90, Triton 3.9).
            values = values.astype(jnp.float16).astype(jnp.float32)
        return values.astype(dtype)

    @property
    def by_steps(self) -> bool:
        """Whether each step has scales of its own."""
        return self.scaling in ("block_1x128", "block_128x128")

    def scales(self, k: jax.Array) -> jax.Array:
        """Factors of the product of step k, to broadcast against it."""
        if self.scaling == "tensorwise":
            index = (jnp.int32(0),)
        elif self.scaling == "rowwise":
            index = (self.rows,)
        elif self.scaling == "block_1x128":
            index = (k, self.rows)
        elif self.rows.shape[0] <= BLOCK:  # a tile is in one block
            index = (jnp.minimum(self.first // BLOCK, self.scales_ref.shape[-2] - 1), k)
        else:
            index = (self.rows // BLOCK, k)
        found = plgpu.load(self.scales_ref.at[(*self.stack, *index)])
        return jnp.expand_dims(found, 1 - self.axis) if found.ndim else found


def sums_of_steps(a: Side, bs: Sequence[Side], first: jax.Array, steps: jax.Array) -> list[jax.Array]:
    """float32 [rows of a, rows of b] for each b, summed over `steps` K steps of 128 from step `first`; the last step is
    masked."""
    K = a.values_ref.shape[1]
    half = jnp.float16 if a.values_ref.dtype == jnp.float16 else jnp.bfloat16

    def factors(k):
        k = jnp.clip(k, 0, pl.cdiv(K, BLOCK) - 1)
        return [[side.scales(k) for side in (a, b) if side.by_steps] for b in bs]

    def step(k, carry, k_in=None):
        sums, now = carry
        ahead = factors(k + 1)  # Triton pipelines only what a product reads
        rows = a.load(k, k_in, half)
        products = [plgpu.dot(rows, b.load(k, k_in, half), trans_b=True) for b in bs]
        terms = [functools.reduce(jnp.multiply, each, x) for each, x in zip(now, products, strict=True)]
        return [acc + term for acc, term in zip(sums, terms, strict=True)], ahead

    def last_step(k, carry):
        return step(k, carry, k * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32) < K)

    whole = jnp.minimum(first + steps, K // BLOCK)
    carry = [jnp.zeros((a.rows.shape[0], b.rows.shape[0]), jnp.float32) for b in bs], factors(first)
    carry = lax.fori_loop(first, whole, step, carry)
    if K % BLOCK:
        carry = lax.fori_loop(whole, first + steps, last_step, carry)
    constant = [[side.scales(first) for side in (a, b) if not side.by_steps] for b in bs]
    return [functools.reduce(jnp.multiply, each, acc) for each, acc in zip(constant, carry[0], strict=True)]


def _rows_kernel(
    schedule_ref, a_ref, a_scales_ref, b_ref, b_scales_ref, out_ref, *, G: int, num_i: int, tiles: Tiles, scalings
):
    (M, N), K = out_ref.shape, a_ref.shape[1]
    t, j = panel_order(pl.program_id(0), num_i, pl.cdiv(N, tiles.bn), tiles.panel)
    group, start, end = _load_entry(schedule_ref, t, 3)
    inside = group < G
    rows, cols = start + jnp.arange(tiles.bm, dtype=jnp.int32), j * tiles.bn + jnp.arange(tiles.bn, dtype=jnp.int32)

    @pl.when(start < end)  # with few rows most entries of the work list are past the last tile
    def _():
        # Clipped, not masked: a tile may read a neighbour's rows, whose results are not stored.
        a = Side(0, a_ref, a_scales_ref, scalings[0], (), start, jnp.clip(rows, 0, M - 1))
        stack, cols_in = (jnp.clip(group, 0, G - 1),), jnp.minimum(cols, N - 1)
        b = Side(1, b_ref, b_scales_ref, scalings[1], stack, j * tiles.bn, cols_in)
        (acc,) = sums_of_steps(a, [b], jnp.int32(0), inside.astype(jnp.int32) * pl.cdiv(K, BLOCK))
        out = jnp.where(inside, acc, 0.0).astype(out_ref.dtype)  # the scales of rows outside may be NaN
        plgpu.store(out_ref.at[rows[:, None], cols[None, :]], out, mask=(rows < end)[:, None] & (cols < N)[None, :])


def _contraction_kernel(schedule_ref, a_ref, a_scales_ref, b_ref, b_scales_ref, out_ref, *, tiles: Tiles, scalings):
    G, M, N = out_ref.shape
    num_i, num_j = pl.cdiv(M, tiles.bm), pl.cdiv(N, tiles.bn)
    i, j = panel_order(pl.program_id(0) % (num_i * num_j), num_i, num_j, tiles.panel)
    g, start, end, first = _load_entry(schedule_ref, pl.program_id(0) // (num_i * num_j), 4)
    rows = i * tiles.bm + jnp.arange(tiles.bm, dtype=jnp.int32)
    cols = j * tiles.bn + jnp.arange(tiles.bn, dtype=jnp.int32)
    a = Side(0, a_ref, a_scales_ref, scalings[0], (), i * tiles.bm, jnp.minimum(rows, M - 1))
    b = Side(1, b_ref, b_scales_ref, scalings[1], (), j * tiles.bn, jnp.minimum(cols, N - 1))
    # No mask: the quantizer pads a group's last step with zeros.
    (acc,) = sums_of_steps(a, [b], first, (end - start + BLOCK - 1) // BLOCK)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    plgpu.store(out_ref.at[jnp.clip(g, 0, G - 1), rows[:, None], cols[None, :]], acc.astype(out_ref.dtype), mask=mask)


def multiply_pallas(
    a: Operand, b: Operand, offsets=None, *, length: int | None = None, out_dtype, fast: bool = False, tiles: Tiles,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """As `multiply_xla`; fast has no effect."""
    how = {"out_dtype": out_dtype, "tiles": tiles, "interpret": interpret}
    (M, _), N = a.values.shape, b.values.shape[-2]
    num_i, num_j = pl.cdiv(M, tiles.bm), pl.cdiv(N, tiles.bn)
    if offsets is None:
        b = Operand(b.values[None], b.scales[None], b.scaling)
        return _launch(jnp.asarray(schedule_one(M, tiles.bm)), a, b, shape=(M, N), programs=num_i * num_j, **how)
    G = offsets.shape[0] - 1
    if length is not None:
        schedule = schedule_groups(offsets, length, interpret)
        return _launch(schedule, a, b, length=length, shape=(G, M, N), programs=G * num_i * num_j, **how)
    schedule, programs = schedule_rows(offsets, M, tiles.bm, interpret), tile_bound(M, G, tiles.bm) * num_j
    return _launch(schedule, a, b, shape=(M, N), programs=programs, **how)


@traced_once("length", "shape", "programs", "out_dtype", "tiles", "interpret")
def _launch(
    schedule: jax.Array, a: Operand, b: Operand, *, length: int | None = None, shape: tuple[int, ...], programs: int,
    out_dtype, tiles: Tiles, interpret: bool,
) -> jax.Array:  # fmt: skip
    """shape: of the result, [M, N], or [G, M, N] of a ragged contraction, over `length` rows."""
    scales = [x.scales[..., None] if x.scaling == "tensorwise" else x.scales for x in (a, b)]
    how: dict[str, Any] = {"tiles": tiles, "scalings": (a.scaling, b.scaling)}
    if len(shape) == 3:
        kernel, name = functools.partial(_contraction_kernel, **how), "fp8_matmul_contraction"
    else:
        num_i = programs // pl.cdiv(shape[1], tiles.bn)
        kernel, name = functools.partial(_rows_kernel, G=b.values.shape[0], num_i=num_i, **how), "fp8_matmul_rows"
    out = out_struct(shape, out_dtype, like=a.values)
    return launch(
        kernel, schedule, a.values, scales[0], b.values, scales[1], out=out,
        grid=(programs,), warps=tiles.warps, stages=tiles.stages, interpret=interpret, name=name,
        flops=2 * shape[-2] * shape[-1] * (length or a.values.shape[1]),
        bytes_accessed=bytes_of_columns(a, b, length) + bytes_of(schedule, out) if length else None,
    )  # fmt: skip
