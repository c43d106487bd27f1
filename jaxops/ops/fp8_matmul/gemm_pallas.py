"""C = A @ B.T of FP8 operands as Pallas kernels lowered through Triton: for every card from Ada on, and for the interpreter.

Triton never makes an FP8 wgmma of Pallas' dot, and takes no two FP8 formats in one: the operands become bfloat16, which is exact, and are multiplied as
such. Correct, not fast; gemm_triton.py is the fast one.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.fp8 import BLOCK
from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.schedule_pallas import COLUMNS, schedule_groups, schedule_one, schedule_rows
from jaxops._lib.tiling import panel_order, tile_bound
from jaxops._lib.traced_once import traced_once
from jaxops.ops.fp8_matmul.operand import Operand
from jaxops.ops.fp8_matmul.plan import Tiles


def _scheduled(schedule_ref, i: jax.Array, count: int) -> list[jax.Array]:
    """The first `count` columns of entry i."""
    return [plgpu.load(schedule_ref.at[n * (schedule_ref.shape[0] // COLUMNS) + i]) for n in range(count)]


@dataclasses.dataclass(frozen=True)
class _Side:
    """The rows of one operand that a program multiplies: all of them there, whatever the program stores."""

    values_ref: Any
    scales_ref: Any
    scaling: str
    stack: tuple[jax.Array, ...]  # (place in the stack,), or () where there is none
    rows: jax.Array

    def load(self, k: jax.Array, k_in: jax.Array | None) -> jax.Array:
        """[rows, 128] of step k in bfloat16, zeros where k_in is false: what lies past K may be NaN."""
        columns = k * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        mask = None if k_in is None else jnp.broadcast_to(k_in[None, :], (self.rows.shape[0], BLOCK))
        at = self.values_ref.at[(*self.stack, self.rows[:, None], columns[None, :])]
        values = plgpu.load(at, mask=mask, other=None if mask is None else 0.0)
        if values.dtype == jnp.float8_e5m2:
            # Through float16, which is exact: Triton's cast from e5m2 to bfloat16 makes finite numbers of NaN (H200, 2026-11-23, JAX 0.11.2).
            values = values.astype(jnp.float16).astype(jnp.float32)
        return values.astype(jnp.bfloat16)

    def scales(self, k: jax.Array) -> jax.Array:
        """[rows], or [1] for all of them."""
        place = {
            "tensorwise": lambda: (jnp.zeros((1,), jnp.int32),),
            "rowwise": lambda: (self.rows,),
            "block_1x128": lambda: (k, self.rows),
            "block_128x128": lambda: (self.rows // BLOCK, k),
        }[self.scaling]()
        return plgpu.load(self.scales_ref.at[(*self.stack, *place)])


def _multiply(a: _Side, b: _Side, first: jax.Array, steps: jax.Array) -> jax.Array:
    """float32 [rows of a, rows of b], summed over `steps` steps of 128 from step `first` on, as far as they are there."""
    K = a.values_ref.shape[1]
    blocks = a.scaling == "block_1x128"

    def scaled(product, k):
        return product * a.scales(k)[:, None] * b.scales(k)[None, :]

    def step(k, acc, k_in=None):
        product = plgpu.dot(a.load(k, k_in), b.load(k, k_in), trans_b=True)
        return acc + (scaled(product, k) if blocks else product)

    def last_step(k, acc):
        return step(k, acc, k * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32) < K)

    whole = jnp.minimum(first + steps, K // BLOCK)
    acc = lax.fori_loop(first, whole, step, jnp.zeros((a.rows.shape[0], b.rows.shape[0]), jnp.float32))
    if K % BLOCK:
        acc = lax.fori_loop(whole, first + steps, last_step, acc)
    return acc if blocks else scaled(acc, first)


def _rows_kernel(
    schedule_ref,
    a_ref,
    a_scales_ref,
    b_ref,
    b_scales_ref,
    out_ref,
    *,
    G: int,
    num_i: int,
    tiles: Tiles,
    scalings: tuple[str, str],
):
    (M, N), K = out_ref.shape, a_ref.shape[1]
    t, j = panel_order(pl.program_id(0), num_i, pl.cdiv(N, tiles.bn), tiles.panel)
    group, start, end = _scheduled(schedule_ref, t, 3)
    inside = group < G
    rows, cols = start + jnp.arange(tiles.bm, dtype=jnp.int32), j * tiles.bn + jnp.arange(tiles.bn, dtype=jnp.int32)
    # Clipped, not masked: a neighbour's rows may be read, and reach only what is not stored.
    a = _Side(a_ref, a_scales_ref, scalings[0], (), jnp.clip(rows, 0, M - 1))
    b = _Side(b_ref, b_scales_ref, scalings[1], (jnp.clip(group, 0, G - 1),), jnp.minimum(cols, N - 1))
    acc = _multiply(a, b, jnp.int32(0), inside.astype(jnp.int32) * pl.cdiv(K, BLOCK))
    out = jnp.where(inside, acc, 0.0).astype(out_ref.dtype)  # whatever the scales of rows outside are
    plgpu.store(out_ref.at[rows[:, None], cols[None, :]], out, mask=(rows < end)[:, None] & (cols < N)[None, :])


def _contraction_kernel(
    schedule_ref, a_ref, a_scales_ref, b_ref, b_scales_ref, out_ref, *, tiles: Tiles, scalings: tuple[str, str]
):
    G, M, N = out_ref.shape
    num_i, num_j = pl.cdiv(M, tiles.bm), pl.cdiv(N, tiles.bn)
    i, j = panel_order(pl.program_id(0) % (num_i * num_j), num_i, num_j, tiles.panel)
    g, start, end, first = _scheduled(schedule_ref, pl.program_id(0) // (num_i * num_j), 4)
    rows, cols = (
        i * tiles.bm + jnp.arange(tiles.bm, dtype=jnp.int32),
        j * tiles.bn + jnp.arange(tiles.bn, dtype=jnp.int32),
    )
    a = _Side(a_ref, a_scales_ref, scalings[0], (), jnp.minimum(rows, M - 1))
    b = _Side(b_ref, b_scales_ref, scalings[1], (), jnp.minimum(cols, N - 1))
    # A group's last step ends in zeros, which the quantiser has written: nothing is masked.
    acc = _multiply(a, b, first, (end - start + BLOCK - 1) // BLOCK)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    plgpu.store(out_ref.at[jnp.clip(g, 0, G - 1), rows[:, None], cols[None, :]], acc.astype(out_ref.dtype), mask=mask)


def multiply_pallas(
    a: Operand,
    b: Operand,
    offsets: jax.Array | None = None,
    *,
    ragged: str | None = None,
    length: int | None = None,
    out_dtype,
    fast: bool = False,
    tiles: Tiles,
    interpret: bool = False,
) -> jax.Array:
    """As `multiply_xla`; fast makes no difference."""
    how = {"out_dtype": out_dtype, "tiles": tiles, "interpret": interpret}
    if ragged == "contraction":
        assert offsets is not None
        assert length is not None
        shape = offsets.shape[0] - 1, a.values.shape[0], b.values.shape[0]
        programs = shape[0] * pl.cdiv(shape[1], tiles.bm) * pl.cdiv(shape[2], tiles.bn)
        return _launch(schedule_groups(offsets, length, interpret), a, b, shape=shape, programs=programs, **how)
    M, N = a.values.shape[0], b.values.shape[-2]
    if ragged is None:
        schedule, num_i = jnp.asarray(schedule_one(M, tiles.bm)), -(-M // tiles.bm)
        b = Operand(b.values[None], b.scales[None], b.scaling)
    else:
        assert offsets is not None
        schedule, num_i = schedule_rows(offsets, M, tiles.bm, interpret), tile_bound(M, b.values.shape[0], tiles.bm)
    return _launch(schedule, a, b, shape=(M, N), programs=num_i * pl.cdiv(N, tiles.bn), **how)


def _launch(schedule, a: Operand, b: Operand, **how) -> jax.Array:
    scales = [x.scales[..., None] if x.scaling == "tensorwise" else x.scales for x in (a, b)]
    return _launch_arrays(schedule, a.values, scales[0], b.values, scales[1], scalings=(a.scaling, b.scaling), **how)


@traced_once("scalings", "shape", "programs", "out_dtype", "tiles", "interpret")
def _launch_arrays(
    *arrays: jax.Array,
    scalings: tuple[str, str],
    shape: tuple[int, ...],
    programs: int,
    out_dtype,
    tiles: Tiles,
    interpret: bool,
) -> jax.Array:
    """arrays: the schedule, A, its scales, B, its scales. shape: of the result, [M, N], or [G, M, N] of a ragged contraction."""
    how: dict[str, Any] = {"tiles": tiles, "scalings": scalings}
    if len(shape) == 3:
        kernel = functools.partial(_contraction_kernel, **how)
    else:
        kernel = functools.partial(
            _rows_kernel, G=arrays[3].shape[0], num_i=programs // pl.cdiv(shape[1], tiles.bn), **how
        )
    return launch(
        kernel,
        *arrays,
        out=out_struct(shape, out_dtype, like=arrays[1]),
        grid=(programs,),
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
        name="fp8_matmul_contraction" if len(shape) == 3 else "fp8_matmul_rows",
    )
