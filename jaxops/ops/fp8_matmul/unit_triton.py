"""A gated linear unit over groups on Hopper, in Gluon: the FP8 products with gate's and up's weights, the activation,
and the cast of the unit to FP8 in blocks of 1x128, in one launch.

Each consumer keeps 64x128 float32 sums of gate and of up in registers, and a third 64x128 for one K step's product:
gate's step is multiplied and added, then up's. Meanwhile the other consumer's products fill the tensor core. All
numbers have the bits of the product (gemm_triton.py) and the cast (`jaxops.quantize`) in two launches.

Its rows may be gathered from an array of tokens (gather_triton.py), which saves a copy of them for each of a token's
choices. The producer is then four warps, with registers that the consumers do not need.
"""

import dataclasses

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.gluon.activations_triton import activate_as_pallas, round_pairs, widen_pairs
from jaxops._lib.gluon.gemm_triton import GATHER_WARPS, advance
from jaxops._lib.gluon.launch_triton import OutTile, Scratch, triton_call
from jaxops._lib.gluon.layouts_triton import accumulator
from jaxops._lib.gluon.schedule_triton import schedule_rows
from jaxops._lib.gluon.stores_triton import pad_to_16_bytes, split_columns, store, store_tile, tile_layout
from jaxops._lib.gluon.tile_scheduler_triton import opaque, read_tile
from jaxops._lib.numerics import fp8
from jaxops._lib.ragged.tiling import tile_bound
from jaxops.ops.fp8_matmul.gather_triton import produce_gathered
from jaxops.ops.fp8_matmul.gemm_triton import load_row_scales, promote, scale_boxes, value_boxes
from jaxops.ops.fp8_matmul.operand import Operand
from jaxops.ops.fp8_matmul.plan import Tiles
from jaxops.ops.fp8_matmul.produce_triton import BLOCK, ROWS, ROWS_OF_ONE, make_stages, produce

BM, BN = gl.constexpr(128), gl.constexpr(128)  # rows, and columns of gate and as many of up, of a tile
MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
HALF = gl.constexpr(accumulator(64))
OF_ROWS = gl.constexpr(gl.SliceLayout(1, MMA.value))
LEAST, MOST, PER_MOST = gl.constexpr(fp8.AMAX_MIN), gl.constexpr(fp8.AMAX_MAX), gl.constexpr(1 / 448)
PAIRS_LAYOUT = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.int16))


@gluon.jit
def _add_step(acc, part, a, b, scales, rows):
    """acc + A @ B.T of one step, scaled. `part` provides the registers of the product; its value is not used."""
    part = warpgroup_mma(a, b.permute((1, 0)), part, use_acc=False, is_async=True)
    scale = rows * scales.load(OF_ROWS)
    part = warpgroup_mma_wait(0, deps=[part])
    return promote(acc, part, scale, 0, BLOCK), part


@gluon.jit
def _sum_both(bufs, steps, s, phase, early, WHICH: gl.constexpr, STAGES: gl.constexpr, GATHERED: gl.constexpr):
    """gate and up of a consumer's rows."""
    a_bufs, b_bufs, sa_bufs, sb_bufs, _tiles, full, empty = bufs
    gate = gl.zeros([ROWS_OF_ONE, BN], gl.float32, MMA)
    up = gl.zeros([ROWS_OF_ONE, BN], gl.float32, MMA)
    part = gl.zeros([ROWS_OF_ONE, BN], gl.float32, MMA)
    for _ in range(steps):
        mbarrier.wait(full.index(s), phase)
        if GATHERED:  # written by threads, read by the tensor core
            fence_async_shared()
            rows = sa_bufs.index(s).slice(WHICH * ROWS_OF_ONE, ROWS_OF_ONE).load(OF_ROWS)
        else:
            rows = load_row_scales(sa_bufs, s, early, WHICH, 2, ROWS, MMA)
        a = a_bufs.index(2 * s + WHICH)
        gate, part = _add_step(gate, part, a, b_bufs.index(2 * s), sb_bufs.index(2 * s), rows)
        up, part = _add_step(up, part, a, b_bufs.index(2 * s + 1), sb_bufs.index(2 * s + 1), rows)
        mbarrier.arrive(empty.index(s), count=1)
        s, phase = advance(s, phase, STAGES)
    return gate, up, s, phase


@gluon.jit
def _scale_and_factor(amax, POW2: gl.constexpr):
    """`jaxops._lib.numerics.fp8.scale_and_factor` for e4m3 and a bfloat16 amax, equal to the bit."""
    m = gl.minimum(gl.maximum(amax, LEAST), MOST)
    bits = m.to(gl.int32, bitcast=True)
    biased = bits >> 23
    mantissa = bits & 0x7FFFFF
    if POW2:
        biased = biased - 8 + (mantissa > 0x600000).to(gl.int32)
        return (biased << 23).to(gl.float32, bitcast=True), ((254 - biased) << 23).to(gl.float32, bitcast=True)
    quotient = (448.0 / (mantissa | 0x3F800000).to(gl.float32, bitcast=True)).to(gl.int32, bitcast=True)
    quotient = (quotient + 256) & -512
    return m * PER_MOST, (quotient - ((biased - 127) << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def _infinity_to_nan(x):
    """bfloat16 numbers, with NaN for infinities: see `fp8.infinity_to_nan`."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $1; }",
        "=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _larger_pairs(a, b):
    """Elementwise maximum of two pairs of non-negative bfloat16 numbers, a pair in 32 bits; NaN is ignored."""
    return gl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _largest_pairs(x, OF_ROWS: gl.constexpr):
    """Of each row of bfloat16 numbers the largest magnitudes in even and in odd columns, a pair in 32 bits."""
    pairs = gl.inline_asm_elementwise(
        "and.b32 $0, $2, 0x7fff7fff; mov.b32 $1, 0;", "=&r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2
    )
    pairs, _ = pairs.reshape([x.shape[0], x.shape[1] // 2, 2]).split()
    return gl.convert_layout(gl.reduce(pairs, 1, _larger_pairs), OF_ROWS)


@gluon.jit
def _amax_of(pairs):
    return gl.maximum((pairs & -0x10000).to(gl.float32, bitcast=True), (pairs << 16).to(gl.float32, bitcast=True))


@gluon.jit
def _unit(gate, up, ACTIVATION: gl.constexpr):
    """In bfloat16, NaN for infinities."""
    return _infinity_to_nan(round_pairs(activate_as_pallas(widen_pairs(gate), ACTIVATION) * widen_pairs(up)))


@gluon.jit
def _store_half(x, desc, ptr, buf, row, end, col, N):
    """64 columns of gate or up, through the memory from which h is stored."""
    half = buf.reinterpret(gl.bfloat16, [ROWS_OF_ONE, BN // 2], desc.layout)
    store(gl.convert_layout(x, HALF, assert_trivial=True), desc, ptr, half, row, end, col, N, HALF, True)


@gluon.jit
def _unit_and_store(gate, up, out, buf, row, end, col, F, ACTIVATION: gl.constexpr):
    """The unit of gate and up; stores these, a half of the columns at a time, with work between the stores, which wait
    for each other."""
    _h_desc, pre_desc, _h_ptr, _scales, pre_ptr = out
    if pre_desc is None:
        return _unit(gate, up, ACTIVATION)
    else:  # noqa: RET505  # decided at compile time
        gate_left, gate_right = split_columns(gate)
        up_left, up_right = split_columns(up)
        _store_half(gate_left, pre_desc, pre_ptr, buf, row, end, col, 2 * F)
        left = _unit(gate_left, up_left, ACTIVATION)
        _store_half(up_left, pre_desc, pre_ptr, buf, row, end, F + col, 2 * F)
        right = _unit(gate_right, up_right, ACTIVATION)
        _store_half(gate_right, pre_desc, pre_ptr, buf, row, end, col + BN // 2, 2 * F)
        h = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS_OF_ONE, BN])
        _store_half(up_right, pre_desc, pre_ptr, buf, row, end, F + col + BN // 2, 2 * F)
        return gl.convert_layout(h, MMA, assert_trivial=True)


@gluon.jit
def _store_unit(h, factor, desc, ptr, buf, row, end, col, F):
    """h times its rows' factors in FP8, two neighbours as one number of 16 bits: as such they are in registers."""
    PAIRS: gl.constexpr = BN // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    assembly: gl.constexpr = """{
        .reg .b32 a, b;
        .reg .b16 q, none;
        shl.b32 a, $1, 16;
        and.b32 b, $1, 0xffff0000;
        mul.f32 a, a, $2;
        mul.f32 b, b, $3;
        cvt.rn.satfinite.e4m3x2.f32 q, b, a;
        mov.b16 none, 0;
        mov.b32 $0, {q, none};
    }"""
    q = gl.inline_asm_elementwise(assembly, "=r,r,r,r", [h, factor[:, None]], dtype=gl.int16, is_pure=True, pack=2)
    q, _ = q.reshape([ROWS_OF_ONE, PAIRS, 2]).split()
    pairs = buf.reinterpret(gl.int16, [ROWS_OF_ONE, PAIRS], PAIRS_LAYOUT)
    tma.store_wait(0)
    pairs.store(q)
    if row + ROWS_OF_ONE <= end:
        fence_async_shared()
        tma.async_store(desc, [row, col], buf)
    else:
        pointers = ptr.to(gl.pointer_type(gl.int16), bitcast=True)
        store_tile(pairs.load(LAYOUT), pointers, row, end, col // 2, F // 2, LAYOUT, True)


@gluon.jit
def _consume(
    args, WHICH: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, POW2: gl.constexpr,
    GATHERED: gl.constexpr,
):  # fmt: skip
    """This consumer's 64 rows of each tile.

    Both begin at once: starting one two steps later, so that it multiplies during the other's epilogue, was 1 to 2 %
    slower (H200, 2026-11-26, 262,144 and 32,768 rows).
    """
    out, bufs, h_bufs, M, F = args
    _a_bufs, _b_bufs, _sa_bufs, _sb_bufs, tile_bufs, full, empty = bufs
    buf = h_bufs.index(WHICH)
    # No change: tells the compiler of the alignment. Opaque: otherwise computed before the warps part, and spilled.
    F = opaque(F) // BN * BN
    s = 0
    phase = 0
    more = True
    while more:
        mbarrier.wait(full.index(s), phase)
        _group, first, end, col, steps = read_tile(tile_bufs, s)
        col = col // BN * BN  # no change: tells the compiler of the alignment
        more = steps >= 0
        row = first + WHICH * ROWS_OF_ONE
        count = gl.where(row < end, max(steps, 0), 0)
        gate, up, s, phase = _sum_both(bufs, count, s, phase, row % 4, WHICH, STAGES, GATHERED)
        for _ in range(max(steps, 1) - count):  # releases what it has not multiplied
            mbarrier.wait(full.index(s), phase)
            mbarrier.arrive(empty.index(s), count=1)
            s, phase = advance(s, phase, STAGES)
        if row < end:
            h = _unit_and_store(round_pairs(gate), round_pairs(up), out, buf, row, end, col, F, ACTIVATION)
            scale, factor = _scale_and_factor(_amax_of(_largest_pairs(h, OF_ROWS)), POW2)
            rows = gl.arange(0, ROWS_OF_ONE, layout=OF_ROWS)
            gl.store(out[3] + gl.cast(col // BN, gl.int64) * M + row + rows, scale, mask=rows < end - row)
            _store_unit(h, factor, out[0], out[2], buf, row, end, col, F)
    tma.store_wait(0)


@gluon.jit
def fp8_unit_kernel(
    a, b_desc, sa, sb, indices, schedule, h_desc, pre_desc, h_ptr, h_scales, pre_ptr,
    tiles, entries, G, M, F, K, T, WIDTH,
    STAGES: gl.constexpr, PANEL: gl.constexpr,
    ACTIVATION: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """a, sa: descriptors of the rows and their scales; with indices pointers to those of T tokens, WIDTH numbers apart,
    and indices are the rows' tokens. h_desc, h_ptr, h_scales: the unit in FP8; pre_desc, pre_ptr: gate and up, or
    None."""
    GATHERED: gl.constexpr = indices is not None
    bufs = make_stages(a, b_desc, sa, sb, BM, BN, STAGES, BLOCK, 2, GATHERED)
    h_bufs = gl.allocate_shared_memory(h_desc.dtype, [2, ROWS_OF_ONE, BN], h_desc.layout)
    consumer_args = ((h_desc, pre_desc, h_ptr, h_scales, pre_ptr), bufs, h_bufs, M, F)
    if GATHERED:
        producer_args = (b_desc, sb, schedule, bufs, tiles, entries, G, F, K)
        gl.warp_specialize([
            (_consume, (consumer_args, 0, STAGES, ACTIVATION, POW2, True)),
            (_consume, (consumer_args, 1, STAGES, ACTIVATION, POW2, True)),
            (produce_gathered, (producer_args, (a, sa, indices, T, WIDTH), BM, BN, STAGES, PANEL)),
        ], [4, GATHER_WARPS], [224, 56])  # fmt: skip
    else:
        producer_args = (a, b_desc, sa, sb, schedule, bufs, tiles, entries, G, M, F, K)
        gl.warp_specialize([
            (_consume, (consumer_args, 0, STAGES, ACTIVATION, POW2, False)),
            (_consume, (consumer_args, 1, STAGES, ACTIVATION, POW2, False)),
            (produce, (producer_args, BM, BN, STAGES, PANEL, ROWS, BLOCK, 2)),
        ], [4, 1], [232, 40])  # fmt: skip


def unit_triton(
    a: Operand, b: Operand, offsets: jax.Array, indices: jax.Array | None = None, *, activation: str, pow2: bool,
    save: bool, tiles: Tiles, cores: int,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """act(gate) * up of A's rows in FP8 [M, F]; its scales [F / 128, M]; with save gate and up [M, 2 F] in bfloat16.

    Args:
      a: [M, K] in blocks of 1x128; with indices the tokens [T, K].
      b: [G, 2 F, K] in blocks of 128x128: gate's and up's weights; F is a multiple of 128. In a's dtype.
      indices: [M] int32, the token of each row, clamped to the T that there are.
      tiles: of h; of bm, bn 128x128 only.
      cores: multiprocessors of the device, the largest persistent grid.
    """
    (T, K), (G, N, _) = a.values.shape, b.values.shape
    M = T if indices is None else indices.shape[0]
    F, dtype = N // 2, a.values.dtype
    schedule, entries = schedule_rows(offsets, M, BM.value, panel=tiles.panel)
    tile_count = tile_bound(M, G, BM.value) * (F // BN.value)
    a = dataclasses.replace(a, values=pad_to_16_bytes(a.values))

    rows, scales = a.values, a.scales
    if indices is None:
        rows, scales = value_boxes(rows, ROWS_OF_ONE.value), scale_boxes(scales, 2 * ROWS_OF_ONE.value)
    like, half = a.values, (ROWS_OF_ONE.value, BN.value // 2)
    results = [out_struct((M, F), dtype, like=like), out_struct((F // fp8.BLOCK, M), jnp.float32, like=like)]
    results += [out_struct((M, N), jnp.bfloat16, like=like)] * save
    h_block = (ROWS_OF_ONE.value, BN.value)
    return triton_call(
        rows, value_boxes(b.values, BN.value), scales, b.scales.reshape(-1), indices,
        Scratch(schedule),
        OutTile(h_block, tile_layout(dtype, h_block)),
        OutTile(half, tile_layout(jnp.bfloat16, half), result=2) if save else None,
        **({} if save else {"pre_ptr": None}),
        kernel=fp8_unit_kernel, grid=min(cores, tile_count), name="fp8_unit", out_type=tuple(results),
        flops=2 * M * N * K, tiles=tile_count, entries=entries, G=G, M=M, F=F, K=K,
        T=T, WIDTH=a.values.shape[1], STAGES=tiles.stages, PANEL=tiles.panel,
        ACTIVATION=activation, POW2=pow2,
    )  # fmt: skip
