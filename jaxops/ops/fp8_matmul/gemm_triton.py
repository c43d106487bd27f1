"""C = A @ B.T of FP8 operands on Hopper, in Gluon: persistent, one producer warp, two or three consumer warp groups.

One kernel for every product of the op. A consumer warp group computes 64 rows of a tile of C; while one scales its
partial sums, the others keep the tensor core busy. Hopper's tensor core accumulates FP8 products with about 14 bits
(DeepSeek-V3, arXiv:2412.19437, section 3.3.2), so unless FAST is set each K step of 128 is added to float32
accumulators in registers. The scales of 1x128 and 128x128 blocks are loaded with the tiles of their K step.

It has a mainloop of its own: in `_lib/gluon/gemm_triton.py` nothing promotes sums, loads scales or splits a tile
between three consumers, and each of these would be a branch in most of its functions.
"""

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.gluon.gemm_triton import advance
from jaxops._lib.gluon.launch_triton import OutTile, Scratch, TensorDescriptor, triton_call
from jaxops._lib.gluon.schedule_triton import schedule_groups, schedule_rows
from jaxops._lib.gluon.stores_triton import pad_to_16_bytes, result_buffers, store, store_plain, tile_layout
from jaxops._lib.gluon.tile_scheduler_triton import opaque, place_in_panel, read_tile, skip_panels
from jaxops._lib.planning.costs import bytes_of
from jaxops._lib.ragged.tiling import tile_bound
from jaxops.ops.fp8_matmul.operand import Operand, bytes_of_columns
from jaxops.ops.fp8_matmul.plan import Tiles
from jaxops.ops.fp8_matmul.produce_triton import (
    BK,
    BLOCK,
    CONTRACTION,
    DENSE,
    OUTER,
    ROWS,
    ROWS_OF_ONE,
    TENSOR,
    VECTOR,
    make_stages,
    multiplied_until,
    operand_rows,
    produce,
    scale_slot,
)


@gluon.jit
def load_row_scales(
    sa_bufs, slot, early, WHICH: gl.constexpr, CONSUMERS: gl.constexpr, KIND: gl.constexpr, MMA: gl.constexpr
):
    """Of a consumer's rows in one step."""
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    sa = sa_bufs.index(CONSUMERS * slot + WHICH).reshape([sa_bufs.shape[2]])
    return sa.gather(early + gl.arange(0, ROWS_OF_ONE, layout=ROW), axis=0) if KIND == ROWS else sa.load(ROW)


@gluon.jit
def _scales_of_columns(sb_bufs, slot, MMA: gl.constexpr):
    return sb_bufs.index(slot).reshape([sb_bufs.shape[2]]).load(gl.SliceLayout(0, MMA))


@gluon.jit
def promote(acc, part, rows, cols, SCALES: gl.constexpr):
    """acc + part * scales for one step. Inline assembly, because the compiler would move all sums of a round to the
    round's end, and spill.
    """
    if SCALES == BLOCK:
        assembly: gl.constexpr = "fma.rn.f32 $0, $1, $2, $3;"
        acc = gl.inline_asm_elementwise(
            assembly, "=f,f,f,f", [part, rows[:, None], acc], dtype=gl.float32, is_pure=False, pack=1
        )
    elif SCALES == OUTER:
        assembly: gl.constexpr = "{ .reg .f32 t; mul.f32 t, $1, $2; fma.rn.f32 $0, t, $3, $4; }"
        scaled = [part, rows[:, None], cols[None, :], acc]
        acc = gl.inline_asm_elementwise(assembly, "=f,f,f,f,f", scaled, dtype=gl.float32, is_pure=False, pack=1)
    else:
        acc = gl.inline_asm_elementwise(
            "add.f32 $0, $1, $2;", "=f,f,f", [part, acc], dtype=gl.float32, is_pure=False, pack=1
        )
    return acc


@gluon.jit
def _sum_fast(
    acc, a_bufs, b_bufs, full, empty, steps, s, phase,
    WHICH: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc + A @ B.T, all steps accumulated by the tensor core; a stage is released while the next step multiplies."""
    for k in range(steps):
        mbarrier.wait(full.index(s), phase)
        acc = warpgroup_mma(a_bufs.index(CONSUMERS * s + WHICH), b_bufs.index(s).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((s + STAGES - 1) % STAGES), count=1, pred=k > 0)
        s, phase = advance(s, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((s + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    return acc, s, phase


@gluon.jit
def _multiply_step(into, a_bufs, b_bufs, full, s, phase, WHICH: gl.constexpr, CONSUMERS: gl.constexpr):
    """Starts the wgmma of one step. `into` provides the registers of the result; its value is not used."""
    mbarrier.wait(full.index(s), phase)
    return warpgroup_mma(
        a_bufs.index(CONSUMERS * s + WHICH), b_bufs.index(s).permute((1, 0)), into, use_acc=False, is_async=True
    )


@gluon.jit
def _sum_rounds(
    acc, rounds, ROUND: gl.constexpr, a_bufs, b_bufs, sa_bufs, sb_bufs, full, empty, s, phase, early,
    WHICH: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, SCALES: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """acc + A @ B.T in rounds of ROUND steps: a step is scaled and added in float32 while the next step multiplies.

    No wgmma is in flight across rounds: ptxas would then wait for every wgmma before it starts the next.
    """
    for _ in range(rounds):
        s1 = s
        phase1 = phase
        part1 = _multiply_step(gl.zeros_like(acc), a_bufs, b_bufs, full, s, phase, WHICH, CONSUMERS)
        done = gl.zeros_like(acc)
        for i in gl.static_range(ROUND):
            s0 = s1
            slot = scale_slot(s1, phase1, STAGES, SCALES)
            part0 = part1
            if i + 1 < ROUND:
                s1, phase1 = advance(s0, phase1, STAGES)
                part1 = _multiply_step(done, a_bufs, b_bufs, full, s1, phase1, WHICH, CONSUMERS)
            rows = 0.0
            cols = 0
            if SCALES == BLOCK:  # loaded before the wait, behind the wgmma; OUTER's scales would not fit the registers
                rows = load_row_scales(sa_bufs, slot, early, WHICH, CONSUMERS, KIND, MMA)
                rows = rows * sb_bufs.index(slot).load(gl.SliceLayout(1, MMA))
            if i + 1 < ROUND:
                done, part1 = warpgroup_mma_wait(1, deps=[part0, part1])
            else:
                done = warpgroup_mma_wait(0, deps=[part0])
            if SCALES == OUTER:
                rows = load_row_scales(sa_bufs, slot, early, WHICH, CONSUMERS, KIND, MMA)
                cols = _scales_of_columns(sb_bufs, slot, MMA)
            mbarrier.arrive(empty.index(s0), count=1)
            acc = promote(acc, done, rows, cols, SCALES)
        s, phase = advance(s1, phase1, STAGES)
    return acc, s, phase


@gluon.jit
def _scale_vectors(acc, sa, sb, num_rows, num_cols, MMA: gl.constexpr):
    """acc times its rows' and its columns' scales."""
    rows = gl.arange(0, ROWS_OF_ONE, layout=gl.SliceLayout(1, MMA))
    cols = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, MMA))
    acc = acc * gl.load(sa + rows, mask=rows < num_rows, other=0.0)[:, None]
    return acc * gl.load(sb + cols, mask=cols < num_cols, other=0.0)[None, :]


@gluon.jit
def _consume(
    args, WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr,
    KIND: gl.constexpr, SCALES: gl.constexpr, FAST: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Multiplies and stores this consumer's 64 rows of each tile.

    The consumers store at the same time. Starting each some steps after the one before it, so that the others multiply
    meanwhile, uses up stages that hide the latency of loads: one step cost 1 to 5 %, three up to 18 % (H200,
    2026-11-26, products over 64 and 128 groups of 256 to 2,048 rows).
    """
    sa, sb, c_desc, c_ptr, c_bufs, bufs, M, N, K = args
    a_bufs, b_bufs, sa_bufs, sb_bufs, tile_bufs, full, empty = bufs
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    CONSUMERS: gl.constexpr = BM // ROWS_OF_ONE
    # K steps per round. Two consumers overlap their own wgmma with their sums within a round of four. Three have fewer
    # registers: a round is one step, and the other two multiply while one sums.
    ROUND: gl.constexpr = 4 if CONSUMERS == 2 else 1
    s = 0
    phase = 0
    num_i = gl.cdiv(opaque(M), BM)  # otherwise computed before the warps part, and spilled
    num_j = gl.cdiv(opaque(N), BN)
    panel = 0
    t, panel = skip_panels(gl.program_id(0), panel, num_i, num_j, PANEL)
    more = panel < num_i if KIND == DENSE else True
    while more:
        if KIND == DENSE:
            # Not from the producer: waiting for a tile's place and reading it took 0.3 us a tile (H200, 2026-11-26).
            i, j = place_in_panel(t, panel, num_i, PANEL)
            group, first, end, col, steps = 0, i * BM, M, j * BN, gl.cdiv(K, BK)
            t, panel = skip_panels(t + gl.num_programs(0), panel, num_i, num_j, PANEL)
            more = panel < num_i
        else:
            mbarrier.wait(full.index(s), phase)
            group, first, end, col, steps = read_tile(tile_bufs, s)
            col = col // BN * BN  # no change: tells the compiler of the alignment
            more = steps >= 0
        row = first + WHICH * ROWS_OF_ONE
        mine = row < end
        a_row, b_row = operand_rows(group, row, col, M, N, KIND)
        scale_a = gl.load(sa) if SCALES == TENSOR else 1.0
        scale_b = gl.load(sb + group if KIND == ROWS else sb) if SCALES == TENSOR else 1.0
        count = steps if KIND == DENSE else gl.where(row < multiplied_until(first, end, BM, KIND), max(steps, 0), 0)
        acc = gl.zeros([ROWS_OF_ONE, BN], gl.float32, MMA)
        if FAST:
            acc, s, phase = _sum_fast(acc, a_bufs, b_bufs, full, empty, count, s, phase, WHICH, CONSUMERS, STAGES)
        else:
            for each in gl.static_range(2 if ROUND > 1 else 1):  # whole rounds, then the remaining steps
                acc, s, phase = _sum_rounds(
                    acc, count // ROUND if each == 0 else count % ROUND, ROUND if each == 0 else 1,
                    a_bufs, b_bufs, sa_bufs, sb_bufs, full, empty, s, phase, a_row % 4,
                    WHICH, CONSUMERS, STAGES, KIND, SCALES, MMA,
                )  # fmt: skip
        if KIND != DENSE:
            for _ in range(max(steps, 1) - count):  # releases what it has not multiplied
                mbarrier.wait(full.index(s), phase)
                mbarrier.arrive(empty.index(s), count=1)
                s, phase = advance(s, phase, STAGES)
        if mine:
            # Rows outside the groups stay zero, even where their scales are NaN.
            if SCALES == TENSOR:
                acc = acc * (scale_a * scale_b if KIND != ROWS else gl.where(steps > 0, scale_a * scale_b, 0.0))
            elif SCALES == VECTOR:
                inside = steps > 0 if KIND == ROWS else True
                acc = _scale_vectors(
                    acc, sa + a_row, sb + b_row, end - row if inside else 0, N - col if inside else 0, MMA
                )
            if c_desc is not None:
                store_plain(acc, c_desc, c_ptr, c_bufs.index(WHICH), row, end, col, N, ALIGNED)
            else:
                store(acc, c_desc, c_ptr, c_bufs.index(WHICH), row, end, col, N, MMA, ALIGNED)
    tma.store_wait(0)


@gluon.jit
def fp8_gemm_kernel(
    a_desc, b_desc, sa, sb, schedule, c_desc, c_ptr, tiles, entries, G, M, N, K,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr,
    KIND: gl.constexpr, SCALES: gl.constexpr, FAST: gl.constexpr, ALIGNED: gl.constexpr, ROOM: gl.constexpr,
):  # fmt: skip
    """ROOM: shared memory has room for whole tiles of two bytes a number."""
    CONSUMERS: gl.constexpr = BM // ROWS_OF_ONE
    bufs = make_stages(a_desc, b_desc, sa, sb, BM, BN, STAGES, SCALES, 1)
    if c_desc is not None:
        c_bufs = gl.allocate_shared_memory(c_desc.dtype, [CONSUMERS, ROWS_OF_ONE, c_desc.block_shape[1]], c_desc.layout)
    else:
        c_bufs = result_buffers(c_ptr, CONSUMERS, ROWS_OF_ONE, BN, ROOM)
    producer_args = (a_desc, b_desc, sa, sb, schedule, bufs, tiles, entries, G, M, N, K)
    consumer_args = (sa, sb, c_desc, c_ptr, c_bufs, bufs, M, N, K)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (consumer_args, 0, BM, BN, STAGES, PANEL, KIND, SCALES, FAST, ALIGNED)),
            (_consume, (consumer_args, 1, BM, BN, STAGES, PANEL, KIND, SCALES, FAST, ALIGNED)),
            (produce, (producer_args, BM, BN, STAGES, PANEL, KIND, SCALES, 1)),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (consumer_args, 0, BM, BN, STAGES, PANEL, KIND, SCALES, FAST, ALIGNED)),
            (_consume, (consumer_args, 1, BM, BN, STAGES, PANEL, KIND, SCALES, FAST, ALIGNED)),
            (_consume, (consumer_args, 2, BM, BN, STAGES, PANEL, KIND, SCALES, FAST, ALIGNED)),
            (produce, (producer_args, BM, BN, STAGES, PANEL, KIND, SCALES, 1)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip


def value_boxes(values: jax.Array, rows: int) -> TensorDescriptor:
    """Boxes of rows and a K step of an operand, whose stacks lie one below the other."""
    layout = tile_layout(values.dtype, (64, BK.value))
    return TensorDescriptor.from_array(
        pad_to_16_bytes(values.reshape(-1, values.shape[-1])), (rows, BK.value), layout=layout
    )


def scale_boxes(scales: jax.Array, rows: int) -> TensorDescriptor:
    """Boxes of the scales of rows in a K step."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_array(pad_to_16_bytes(scales), (1, rows), layout=layout)


def multiply_triton(
    a: Operand, b: Operand, offsets=None, *, length: int | None = None, out_dtype, fast: bool,
    tiles: Tiles, cores: int,
) -> jax.Array:  # fmt: skip
    """A @ B.T on Hopper; arguments as in `multiply_xla`.

    Args:
      fast: the tensor core accumulates over all of K; ignored with block scales.
      cores: multiprocessors of the device, the largest persistent grid.
    """
    (M, K), N, scales = a.values.shape, b.values.shape[-2], scales_of(a, b)
    fast = fast and scales < BLOCK.value
    if tiles.bn > 128 and not fast:
        raise ValueError(f"{tiles} leaves no registers for sums promoted to float32: use bn=128.")
    G, bm, bn = 1 if offsets is None else offsets.shape[0] - 1, tiles.bm, tiles.bn
    kind, num_i, schedule, entries = DENSE, -(-M // bm), None, 0
    if offsets is not None and length is None:
        kind, num_i = ROWS, tile_bound(M, G, bm)
        schedule, entries = schedule_rows(offsets, M, bm, panel=tiles.panel)
    elif offsets is not None:
        kind, num_i = CONTRACTION, G * num_i
        schedule, entries = schedule_groups(offsets, length)
    tile_count, contraction = num_i * -(-N // bn), kind is CONTRACTION

    values, sa, sb = [value_boxes(a.values, 64), value_boxes(b.values, bn)], a.scales, b.scales
    if scales >= BLOCK.value:
        sa = scale_boxes(sa, 128 if kind is ROWS else 64)
    sb = scale_boxes(sb, bn) if scales == OUTER.value else sb.reshape(-1)
    out_type = out_struct((G * M if contraction else M, N), out_dtype, like=a.values)
    itemsize = jnp.dtype(out_dtype).itemsize
    columns = tiles.stored(itemsize)
    by_tma = N * itemsize % 16 == 0 and columns > 0
    tile = OutTile((64, columns), tile_layout(out_dtype, (64, columns))) if by_tma else None
    # A plain descriptor: with row windows this kernel was 3 to 4 % slower (H200, 2026-11-23, dsmoe16b and qwen3_30b).
    out = triton_call(
        *values, sa, sb, schedule if schedule is None else Scratch(schedule), tile,
        kernel=fp8_gemm_kernel, grid=min(cores, tile_count),
        name=f"fp8_gemm_{('dense', 'rows', 'contraction')[kind.value]}",
        out_type=out_type, flops=2 * M * N * (length or K), tiles=tile_count,
        bytes_accessed=bytes_of_columns(a, b, length) + bytes_of(schedule, out_type) if length else None,
        entries=entries, G=G, M=M, N=N, K=K,
        BM=bm, BN=bn, STAGES=tiles.stages, PANEL=tiles.panel,
        KIND=kind.value, SCALES=scales, FAST=fast,
        ALIGNED=N % 8 == 0, ROOM=tiles.stored(2) == bn,
    )  # fmt: skip
    return out.reshape(G, M, N) if contraction else out


def scales_of(a: Operand, b: Operand) -> int:
    blocks = OUTER if b.scaling == "block_1x128" else BLOCK
    return {"tensorwise": TENSOR, "rowwise": VECTOR, "block_1x128": blocks}[a.scaling].value
