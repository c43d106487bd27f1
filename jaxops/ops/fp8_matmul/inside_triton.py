"""C = x @ B.T on Hopper with x in bfloat16, which the launch casts itself: the product of gemm_triton.py, and in each
program three more warps that cast x (cast_triton.py) while its tensor cores multiply.

A producer loads a step of A once its cast is announced in global memory. No wait lasts for ever, also where other
kernels occupy multiprocessors:

- Casting warps take the next unit of all programs from a counter, so a program that is not resident has none. Each warp
  does its units in order. Of the units not done, the lowest waits for nothing but its own loads: only units of lower
  numbers have to be done before it. So the casting warps of the resident programs do all units, whatever other warps
  wait for.
- A producer waits for casts and for the consumers of its program, a consumer for the producer of its program. No warp
  waits for another program's product.

Slower than a cast before wherever it was measured: 8192 x 4096 x 4096 in blocks 233 us, with the cast before 224, the
product alone 200; with the column layout 266, with the cast before 244; 1024 x 4096 x 4096 40, 32 and 28 (H200,
2026-11-26, when a thread still cast one row at a time).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.gluon.launch_triton import OutTile, Scratch, TensorDescriptor, triton_call
from jaxops._lib.gluon.stores_triton import pad_to_16_bytes, tile_layout
from jaxops._lib.numerics.fp8 import BLOCK as BLOCK_SIZE
from jaxops._lib.planning.device import HOPPER_SHARED_BYTES
from jaxops.ops.fp8_matmul.cast_triton import PANELS, Casts, cast
from jaxops.ops.fp8_matmul.gemm_triton import (
    SCALES_LAYOUT,
    check_registers,
    consume,
    make_buffers,
    scales_of,
)
from jaxops.ops.fp8_matmul.operand import Operand
from jaxops.ops.fp8_matmul.plan import Tiles
from jaxops.ops.fp8_matmul.produce_triton import BLOCK, DENSE, produce

CASTERS = gl.constexpr(3)  # warps that cast; with the producer they fill a warp group


@gluon.jit
def fp8_gemm_inside_kernel(
    x_desc, xt_desc, a_desc, b_desc, sa_desc, sb, state, c_desc, c_ptr, values, scales, values_t, scales_t,
    tiles, units, M, N, K, width, height,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, SCALES: gl.constexpr,
    FAST: gl.constexpr, ALIGNED: gl.constexpr, CHUNK: gl.constexpr, HEIGHT: gl.constexpr,
    BOXES: gl.constexpr, DEPTH: gl.constexpr, COLS: gl.constexpr, POW2: gl.constexpr, ALIGN: gl.constexpr,
):  # fmt: skip
    sa = sa_desc if SCALES == BLOCK else scales
    bufs, c_bufs = make_buffers(a_desc, b_desc, sa, sb, c_desc, c_ptr, BM, BN, STAGES, SCALES)
    BOX: gl.constexpr = x_desc.block_shape
    BY_ROW: gl.constexpr = SCALES != BLOCK
    x_bufs = gl.allocate_shared_memory(gl.bfloat16, [DEPTH * CASTERS, BOX[0], BOX[1]], x_desc.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [DEPTH * CASTERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH * CASTERS):
        mbarrier.init(loaded.index(i), count=1)
    casts = Casts(state, BM, HEIGHT, BOX[0], BOXES * BOX[1] // 128, CHUNK)
    cast_args = (
        (x_desc, xt_desc), values, scales, values_t, scales_t, x_bufs, loaded, units, M, K, width, height,
    )  # fmt: skip
    producer_args = (a_desc, b_desc, sa, sb, None, bufs, tiles, 0, 1, M, N, K)
    consumer_args = (sa, sb, c_desc, c_ptr, c_bufs, bufs, M, N, K)
    CONSUMER: gl.constexpr = 176 if BN == 64 else 224 if BY_ROW else 216
    OTHER: gl.constexpr = 152 if BN == 64 else 56 if BY_ROW else 72
    if BM == 128:
        gl.warp_specialize([
            (consume, (consumer_args, 0, BM, BN, STAGES, PANEL, DENSE, SCALES, FAST, ALIGNED)),
            (consume, (consumer_args, 1, BM, BN, STAGES, PANEL, DENSE, SCALES, FAST, ALIGNED)),
            (produce, (producer_args, casts, BM, BN, STAGES, PANEL, DENSE, SCALES, False, 1)),
            (cast, (cast_args, casts, 0, BOXES, DEPTH, COLS, BY_ROW, POW2, ALIGN)),
            (cast, (cast_args, casts, 1, BOXES, DEPTH, COLS, BY_ROW, POW2, ALIGN)),
            (cast, (cast_args, casts, 2, BOXES, DEPTH, COLS, BY_ROW, POW2, ALIGN)),
        ], [4, 1, 1, 1, 1], [CONSUMER, OTHER, OTHER, OTHER, OTHER])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (consumer_args, 0, BM, BN, STAGES, PANEL, DENSE, SCALES, FAST, ALIGNED)),
            (consume, (consumer_args, 1, BM, BN, STAGES, PANEL, DENSE, SCALES, FAST, ALIGNED)),
            (consume, (consumer_args, 2, BM, BN, STAGES, PANEL, DENSE, SCALES, FAST, ALIGNED)),
            (produce, (producer_args, casts, BM, BN, STAGES, PANEL, DENSE, SCALES, False, 1)),
            (cast, (cast_args, casts, 0, BOXES, DEPTH, COLS, BY_ROW, POW2, ALIGN)),
            (cast, (cast_args, casts, 1, BOXES, DEPTH, COLS, BY_ROW, POW2, ALIGN)),
            (cast, (cast_args, casts, 2, BOXES, DEPTH, COLS, BY_ROW, POW2, ALIGN)),
        ], [4, 4, 1, 1, 1, 1], [152, 152, 56, 56, 56, 56])  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Casting:
    """How x is cut into units, and the tiles of the product.

    Attributes:
      tiles: with as many stages as fit beside the boxes.
      by_row: a row shares a scale; else 1x128 blocks.
      box: rows and columns that one load of x brings.
      boxes: of a unit, beside each other.
      depth: boxes that a warp has in shared memory.
      chunk: K steps that share a flag.
      height: rows of a panel of units.
      cols: columns of a box for the column layout; 0: there is none.
    """

    tiles: Tiles
    by_row: bool
    box: tuple[int, int]
    boxes: int
    depth: int
    chunk: int
    height: int
    cols: int

    @classmethod
    def of(cls, tiles: Tiles, by_row: bool, both: bool, *, chunk: int = 4, least: int | None = None) -> "Casting":
        """both: the column layout, too. least: bytes of a box; stages are left out for it.

        With block scales by default as many as fit three stages of 192x128: 233 us against 245 us with small boxes and
        four stages (H200, 2026-11-26, 8192 x 4096 x 4096)."""
        bm, bn, casters = tiles.bm, tiles.bn, CASTERS.value
        each = 128 * (bm + bn) + 4 * bm * (not by_row) + 40  # bytes of a stage
        room = lambda stages: HOPPER_SHARED_BYTES - stages * each - 2 * bm * bn - 512
        sizes = [(8192, 2), (4096, 3), (4096, 2), (2048, 3), (2048, 2)]  # of boxes, and depths
        stages, least = tiles.stages, least or (2048 if by_row else 8192)
        while room(stages) < 2 * casters * least:
            stages -= 1
        size, depth = next(x for x in sizes if casters * x[0] * x[1] <= room(stages))
        box = (8, size // 16) if by_row else (size // 256, BLOCK_SIZE)
        boxes = 2 if size == 8192 else 4
        steps = boxes * box[1] // BLOCK_SIZE
        common = math.lcm(bm, BLOCK_SIZE)
        height = -(-tiles.panel * bm // common) * common
        tiles = dataclasses.replace(tiles, stages=stages)
        return cls(tiles, by_row, box, boxes, depth, max(chunk // steps, 1) * steps, height, size // 256 if both else 0)

    def units(self, M: int, K: int) -> int:
        panels = [self.height] * (M // self.height) + [M % self.height]
        rows = sum(-(-panel // self.box[0]) for panel in panels) * -(-K // (self.boxes * self.box[1]))
        columns = -(-M // BLOCK_SIZE) * -(-K // (self.boxes * self.cols)) if self.cols else 0
        return rows + (rows if self.by_row else columns)

    def state(self, M: int, K: int) -> int:
        """Numbers of the state: see cast_triton.py."""
        down, chunks = -(-M // self.tiles.bm), -(-K // (BLOCK_SIZE * self.chunk))
        return PANELS.value + -(-M // self.height) + down * chunks + (down + M if self.by_row else 0)


def multiply_inside(
    x: jax.Array, b: Operand, *, out_dtype, fast: bool, both: bool = False, pow2: bool = False, tiles: Tiles,
    cores: int, casting: Casting | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:  # fmt: skip
    """x[M, K], cast as b's scaling demands, times B.T with b[N, K]: C [M, N]; and x's column layout, or None twice.

    Args:
      b: rowwise, for rows of x with a scale each, or in 128x128 blocks, for 1x128 blocks of x.
      fast: the tensor core accumulates over all of K; ignored with block scales.
      both: with block scales, also x's column layout, values_t [K, M] and scales_t [cdiv(M, 128), K].
      cores: multiprocessors of the device, the number of programs.
    """
    (M, K), N, blocks = x.shape, b.values.shape[0], b.scaling == "block_128x128"
    casting = casting or Casting.of(tiles, not blocks, both)
    tiles, fast = casting.tiles, fast and not blocks
    check_registers(tiles, fast)
    padded = pad_to_16_bytes(x)
    boxes = [casting.box, *[(BLOCK_SIZE, casting.cols)] * both]
    x_descs = [TensorDescriptor.from_array(padded, box, layout=tile_layout(x.dtype, box)) for box in boxes]
    width, height = -(-K // 16) * 16, -(-M // 4) * 4  # of rows of values and block scales: whole 16 bytes, for TMA
    fp8, f32 = b.values.dtype, jnp.dtype("float32")
    results = [((M, N), out_dtype), ((M, width), fp8), ((-(-K // BLOCK_SIZE), height) if blocks else (M,), f32)]
    results += [((K, M), fp8), ((-(-M // BLOCK_SIZE), K), f32)] if both else []
    state = jnp.zeros(casting.state(M, K), jnp.int32)
    # By TMA whole tiles of two bytes a number, halves of float32: of the same size, which `Casting` leaves free.
    columns = 2 * tiles.bn // jnp.dtype(out_dtype).itemsize
    by_tma = N * jnp.dtype(out_dtype).itemsize % 16 == 0
    values = pad_to_16_bytes(b.values)
    out_layout = tile_layout(out_dtype, (64, columns)) if by_tma else None
    found = triton_call(
        *(*x_descs, None)[:2],
        OutTile((64, BLOCK_SIZE), tile_layout(fp8, (64, BLOCK_SIZE)), result=1),
        TensorDescriptor.from_array(values, (tiles.bn, BLOCK_SIZE), layout=tile_layout(fp8, (64, BLOCK_SIZE))),
        OutTile((1, 64), SCALES_LAYOUT, result=2) if blocks else None,
        b.scales.reshape(-1),
        Scratch(state),
        OutTile((64, columns), out_layout) if by_tma else None,
        kernel=fp8_gemm_inside_kernel, grid=cores, name="fp8_gemm_inside",
        out_type=tuple(out_struct(*shape_and_dtype, like=x) for shape_and_dtype in results), flops=2 * M * N * K,
        **({} if both else {"values_t": None, "scales_t": None}),
        tiles=-(-M // tiles.bm) * -(-N // tiles.bn), units=casting.units(M, K), M=M, N=N, K=K,
        width=width, height=height, BM=tiles.bm, BN=tiles.bn, STAGES=tiles.stages, PANEL=tiles.panel,
        SCALES=scales_of(Operand(x, b.scales, "block_1x128" if blocks else "rowwise"), b), FAST=fast,
        ALIGNED=N % 8 == 0, CHUNK=casting.chunk, HEIGHT=casting.height,
        BOXES=casting.boxes, DEPTH=casting.depth, COLS=casting.cols, POW2=pow2, ALIGN=math.gcd(M, 16),
    )  # fmt: skip
    return found[0], *(found[3:] if both else (None, None))
