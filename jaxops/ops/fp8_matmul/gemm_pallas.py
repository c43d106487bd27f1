"""C = A @ B.T of FP8 operands as Pallas kernels lowered through Triton: for every GPU from Ada on, and the interpreter.

Triton compiles no FP8 wgmma from Pallas' dot, and takes no dot of two FP8 formats: the operands are converted to
bfloat16, which is exact, and multiplied. On Hopper gemm_triton.py is faster for FP8 by FP8; rows that are not quantized
have these kernels alone.

A's rows may be cast in the launch (`Operand.cast`): each program casts the rows of its tile, step by step, so every
tile of columns casts them again. That saves a launch and the FP8 rows in memory, and pays where rows are few.

With few rows, reading B takes the time. Sums may be split over programs: a second pass adds the parts in their order,
elementwise, so that XLA does it in the operation that reads the result.
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

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.arrays.sums import steps_of_part, sum_of_parts
from jaxops._lib.numerics.fp8 import BLOCK, cast_saturating, infinity_to_nan, magnitudes
from jaxops._lib.pallas import masked_pallas as masked
from jaxops._lib.pallas.launch_pallas import launch
from jaxops._lib.pallas.schedule_pallas import finds_own, schedule_groups, tile_of, work_of_rows
from jaxops._lib.planning.costs import bytes_of
from jaxops._lib.planning.traced_once import traced_once
from jaxops._lib.ragged.tiling import panel_order, tile_bound
from jaxops._lib.ragged.work_list import COLUMNS
from jaxops.ops.fp8_matmul.operand import Operand, bytes_of_columns
from jaxops.ops.fp8_matmul.plan import Tiles
from jaxops.ops.quantize import Format


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
      exists: [rows], which of them are read; the others are zeros. None for all.
      cast: see `Operand`.
      saturates: the cast instruction clips (not in the interpreter).
    """

    axis: int
    values_ref: Any
    scales_ref: Any
    scaling: str
    stack: tuple[jax.Array, ...]
    first: jax.Array
    rows: jax.Array
    exists: jax.Array | None = None
    cast: Format | None = None
    saturates: bool = True

    def load_cast(self, columns: jax.Array, k_in: jax.Array | None) -> tuple[jax.Array, list[jax.Array]]:
        """The values of a step in FP8 or, unquantized, in half precision; and, of rows that are cast here, the factors
        of its product. The bits are those of `jaxops.quantize`."""
        x = self.load(columns, k_in)
        if self.cast is None:
            return x, []
        amax = jnp.max(magnitudes(x), axis=1)
        scale, factor = self.cast.scale_and_factor(amax, is_bfloat16=x.dtype == jnp.bfloat16)
        values = cast_saturating(infinity_to_nan(x) * factor[:, None], self.cast.dtype, self.saturates)
        return values, [jnp.expand_dims(scale, 1 - self.axis)]

    def load(self, columns: jax.Array, k_in: jax.Array | None) -> jax.Array:
        """[rows, columns], zeros where k_in is false: memory past K may hold NaN."""
        exists = None if self.exists is None else self.exists[:, None]
        mask = masked.both(exists, None if k_in is None else k_in[None, :])
        return masked.load(self.values_ref, (*self.stack, self.rows[:, None], columns[None, :]), mask)

    @property
    def by_steps(self) -> bool:
        """Whether each step has scales of its own in memory."""
        return self.scaling in ("block_1x128", "block_128x128") and self.cast is None

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
        scales = plgpu.load(self.scales_ref.at[(*self.stack, *index)])
        return jnp.expand_dims(scales, 1 - self.axis) if scales.ndim else scales


def _converted(values: jax.Array, dtype: Any) -> jax.Array:
    """In bfloat16 or float16."""
    if values.dtype.itemsize == 1 and dtype != jnp.float16:
        # Through float16 and float32, exactly. Triton's cast from e5m2 to bfloat16 turns NaN into finite numbers
        # (H200, 2026-11-23, JAX 0.11.2); that from e4m3 has an instruction from float16 to bfloat16 for each
        # number, at an eighth of the rate of those from float32 (sm_90, Triton 3.9).
        values = values.astype(jnp.float16).astype(jnp.float32)
    return values.astype(dtype)


def sums_of_rows(tiles: Tiles, a: Side, bs: Sequence[Side], first: jax.Array, steps: jax.Array) -> list[jax.Array]:
    """float32 [rows of a, rows of b] for each b, summed over `steps` K steps of 128 from step `first`."""
    if not tiles.swap:
        return sums_of_steps(a, bs, first, steps)
    b_first = [dataclasses.replace(b, axis=0) for b in bs]
    return [acc.T for acc in sums_of_steps(dataclasses.replace(a, axis=1), b_first, first, steps)]


def part_of_steps(tiles: Tiles, K: int, number: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """First step and count of steps of part `number` of sums over K; None for whole sums."""
    steps = pl.cdiv(K, BLOCK)
    if number is None:
        return jnp.int32(0), jnp.int32(steps)
    return steps_of_part(steps, tiles.split, number)


def sums_of_steps(a: Side, bs: Sequence[Side], first: jax.Array, steps: jax.Array) -> list[jax.Array]:
    """float32 [rows of a, rows of b] for each b, or transposed where b's axis is 0, summed over `steps` K steps of 128
    from step `first`; the last step is masked."""
    K = a.values_ref.shape[1]
    half = jnp.float16 if a.values_ref.dtype == jnp.float16 and a.cast is None else jnp.bfloat16

    def factors(k):
        """Of step k."""
        k = jnp.clip(k, 0, pl.cdiv(K, BLOCK) - 1)
        return [[side.scales(k) for side in (a, b) if side.by_steps] for b in bs]

    def step(k, carry, masked=False):
        sums, scales = carry
        ahead = factors(k + 1)  # Triton pipelines only what a product reads
        columns = k * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        k_in = columns < K if masked else None
        rows, own = a.load_cast(columns, k_in)
        rows = _converted(rows, half)
        operands = [(rows, _converted(b.load(columns, k_in), half)) for b in bs]
        ordered = operands if a.axis == 0 else [(y, x) for x, y in operands]
        products = [plgpu.dot(x, y, trans_b=True) for x, y in ordered]
        return [acc + _scaled(x, own + each) for acc, x, each in zip(sums, products, scales, strict=True)], ahead

    whole = jnp.minimum(first + steps, K // BLOCK)
    shapes = [(a.rows.shape[0], b.rows.shape[0]) for b in bs]
    # Scales that are the same in all steps: loaded before the sum, not waited for after it.
    constant = [[side.scales(jnp.int32(0)) for side in (a, b) if not side.by_steps and side.cast is None] for b in bs]
    carry = [jnp.zeros(x if a.axis == 0 else x[::-1], jnp.float32) for x in shapes], factors(first)
    carry = lax.fori_loop(first, whole, step, carry)
    if K % BLOCK:
        carry = lax.fori_loop(jnp.maximum(first, whole), first + steps, functools.partial(step, masked=True), carry)
    return [_scaled(acc, scales) for acc, scales in zip(carry[0], constant, strict=True)]


def _scaled(x: jax.Array, factors: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.multiply, factors, x)


def _rows_kernel(*refs, G: int | None, num_i: int, tiles: Tiles, scalings, cast: Format | None, interpret: bool):
    """refs: `work_of_rows` with groups; the operands; the result, [M, N], or with `tiles.split` [split, M, N]."""
    *work_ref, a_ref, a_scales_ref, b_ref, b_scales_ref, out_ref = refs
    (*_, M, N), K = out_ref.shape, a_ref.shape[1]
    t, j = panel_order(pl.program_id(0), num_i, pl.cdiv(N, tiles.bn), tiles.panel)
    if G is None:  # one matrix, without a work list
        group, start = jnp.int32(0), t * tiles.bm
        end = jnp.minimum(start + tiles.bm, M)
    else:
        group, start, end = tile_of(work_ref[0], t, G, M, tiles.bm)
    rows, cols = start + jnp.arange(tiles.bm, dtype=jnp.int32), j * tiles.bn + jnp.arange(tiles.bn, dtype=jnp.int32)
    number = pl.program_id(1) if tiles.split > 1 else None
    at = (rows[:, None], cols[None, :]) if number is None else (number, rows[:, None], cols[None, :])
    first, steps = part_of_steps(tiles, K, number)

    def store(values):
        masked.store(out_ref, at, values, (rows < end)[:, None] & (cols < N)[None, :])

    def multiply():
        # Few rows read no others: a tile is mostly empty. Elsewhere a tile may read a neighbour's rows, whose results
        # are not stored.
        exists = rows < end if finds_own(M) and not (G is None and M % tiles.bm == 0) else None
        a = Side(0, a_ref, a_scales_ref, scalings[0], (), start, jnp.clip(rows, 0, M - 1), exists, cast, not interpret)
        stack, cols_in = () if G is None else (jnp.clip(group, 0, G - 1),), jnp.minimum(cols, N - 1)
        b = Side(1, b_ref, b_scales_ref, scalings[1], stack, j * tiles.bn, cols_in)
        # Not a constant: the compiler would unroll a loop over all of K.
        store(sums_of_rows(tiles, a, [b], first, jnp.minimum(end - start, 1) * steps)[0])

    if G is None:
        multiply()
    else:  # with few rows most entries of the work list are past the last tile
        pl.when((start < end) & (group < G))(multiply)
        pl.when((start < end) & (group >= G))(lambda: store(jnp.zeros((1, 1), jnp.float32)))


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
    options = {"out_dtype": out_dtype, "tiles": tiles, "interpret": interpret}
    (M, _), N = a.values.shape, b.values.shape[-2]
    num_i, num_j = pl.cdiv(M, tiles.bm), pl.cdiv(N, tiles.bn)
    if offsets is None:
        return _launch(None, a, b, shape=(M, N), programs=num_i * num_j, **options)
    G = offsets.shape[0] - 1
    if length is not None:
        schedule = schedule_groups(offsets, length, interpret)
        return _launch(schedule, a, b, length=length, shape=(G, M, N), programs=G * num_i * num_j, **options)
    work, programs = work_of_rows(offsets, M, tiles.bm, interpret), tile_bound(M, G, tiles.bm) * num_j
    return _launch(work, a, b, shape=(M, N), programs=programs, **options)


@traced_once("length", "shape", "programs", "out_dtype", "tiles", "interpret")
def _launch(
    work: jax.Array | None, a: Operand, b: Operand, *, length: int | None = None, shape: tuple[int, ...], programs: int,
    out_dtype, tiles: Tiles, interpret: bool,
) -> jax.Array:  # fmt: skip
    """work: of rows, None without groups; or of groups. shape: of the result, [M, N], or [G, M, N] of a ragged
    contraction, over `length` rows."""
    scales = [x.scales[..., None] if x.scaling == "tensorwise" else x.scales for x in (a, b)]
    static: dict[str, Any] = {"tiles": tiles, "scalings": (a.scaling, b.scaling)}
    out, grid, split = out_struct(shape, out_dtype, like=a.values), (programs,), tiles.split
    if len(shape) == 3:
        kernel, name, split = functools.partial(_contraction_kernel, **static), "fp8_matmul_contraction", 1
    else:
        num_i, G = programs // pl.cdiv(shape[1], tiles.bn), None if work is None else b.values.shape[0]
        static |= {"G": G, "num_i": num_i, "cast": a.cast, "interpret": interpret}
        kernel, name = functools.partial(_rows_kernel, **static), "fp8_matmul_rows"
    if split > 1:
        out, grid = out_struct((split, *shape), jnp.float32, like=a.values), (programs, split)
    result = launch(
        kernel, *([] if work is None else [work]), a.values, scales[0], b.values, scales[1], out=out,
        grid=grid, warps=tiles.warps, stages=tiles.stages, interpret=interpret, name=name,
        flops=2 * shape[-2] * shape[-1] * (length or a.values.shape[1]),
        bytes_accessed=bytes_of_columns(a, b, length) + bytes_of(work, out) if length else None,
    )  # fmt: skip
    return result if split == 1 else sum_of_parts(result).astype(out_dtype)
