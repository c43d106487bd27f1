"""C = x @ B.T on Hopper with x in bfloat16: a consumer casts its 64 x 128 of x in registers, which wgmma reads as A.

The cast needs no pass over memory, but is repeated for every 192 columns of C: it pays where C is narrow. Accumulators
of 256 columns would not fit the registers beside the cast.
"""

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from jaxops._lib import fp8
from jaxops._lib.gemm_triton import advance
from jaxops._lib.launch_triton import TensorDescriptor, triton_call
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.stores_triton import pad_to_16_bytes, result_buffers, store, store_tile, tile_layout
from jaxops.ops.fp8_matmul.operand import Operand
from jaxops.ops.fp8_matmul.plan import Tiles
from jaxops.ops.fp8_matmul.produce_triton import BK, DENSE, fetch_tile, place_tile

LEAST, MOST, PER_MOST = gl.constexpr(fp8.AMAX_MIN), gl.constexpr(fp8.AMAX_MAX), gl.constexpr(1 / 448)


@gluon.jit
def _columns(col):
    """First columns of the tile's 128 and 64 columns: neither part crosses a 128x128 block of B's scales."""
    odd = col // 64 % 2
    return col + 64 * odd, col + 128 * (1 - odd)


@gluon.jit
def _produce(
    x_desc, b_desc, b64_desc, sb, x_bufs, b_bufs, b64_bufs, sb_bufs, full, empty, tiles, M, N, K,
    STAGES: gl.constexpr, PANEL: gl.constexpr,
):  # fmt: skip
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    s = 0
    phase = 1
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        fetched = fetch_tile(t, tiles, sb, 0, 1, M, N, 128, 192, PANEL, DENSE)
        _, a_row, _end, col, _first_k, steps = place_tile(fetched, 1, M, K, DENSE)
        wide, narrow = _columns(col)
        last = gl.cdiv(N, 128) - 1
        wide_scales = sb + min(wide // 128, last) * steps
        narrow_scales = sb + min(narrow // 128, last) * steps
        scale0 = gl.load(wide_scales)
        scale1 = gl.load(narrow_scales)
        for k in range(steps):
            mbarrier.wait(empty.index(s), phase)
            sb_bufs.index(2 * s).store(gl.full([1], scale0, gl.float32, ONE))
            sb_bufs.index(2 * s + 1).store(gl.full([1], scale1, gl.float32, ONE))
            mbarrier.expect(full.index(s), x_desc.nbytes_per_cta + b_desc.nbytes_per_cta + b64_desc.nbytes_per_cta)
            tma.async_load(x_desc, [a_row, k * BK], full.index(s), x_bufs.index(s))
            tma.async_load(b_desc, [wide, k * BK], full.index(s), b_bufs.index(s))
            tma.async_load(b64_desc, [narrow, k * BK], full.index(s), b64_bufs.index(s))
            scale0 = gl.load(wide_scales + min(k + 1, steps - 1))
            scale1 = gl.load(narrow_scales + min(k + 1, steps - 1))
            s, phase = advance(s, phase, STAGES)


@gluon.jit
def _scale_and_factor(amax, POW2: gl.constexpr):
    """`jaxops._lib.fp8.scale_and_factor` for e4m3 and a bfloat16 amax, equal to the bit."""
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
def _larger_pairs(a, b):
    """Elementwise maximum of two pairs of non-negative bfloat16 numbers, a pair in 32 bits; NaN is ignored."""
    return gl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _cast(x_buf, FIRST: gl.constexpr, A: gl.constexpr, PAIRS: gl.constexpr, POW2: gl.constexpr):
    """Rows FIRST to FIRST + 63 of one step in FP8, in registers, and their scales. In assembly: the compiler's own code
    has two thirds more instructions.
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    pairs = x_buf.reinterpret(gl.int32, [x_buf.shape[0], 64], SHARED).slice(FIRST, 64).load(PAIRS)
    pair = gl.reduce(pairs & 0x7FFF7FFF, 1, _larger_pairs)
    amax = gl.maximum((pair & -0x10000).to(gl.float32, bitcast=True), (pair << 16).to(gl.float32, bitcast=True))
    scale, factor = _scale_and_factor(amax, POW2)
    # quantize casts an infinity to NaN, so that its row of C is NaN. A NaN scale has the same effect, once per 128
    # numbers.
    scale = gl.where(amax < float("inf"), scale, float("nan"))
    factor = gl.convert_layout(factor, gl.SliceLayout(1, A))
    x = x_buf.slice(FIRST, 64).load(A)
    factors = factor[:, None] + gl.zeros([64, 128], gl.float32, A)
    q = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        .reg .b16 lo, hi;
        shl.b32 a, $1, 16;
        and.b32 b, $1, 0xffff0000;
        shl.b32 c, $2, 16;
        and.b32 d, $2, 0xffff0000;
        mul.f32 a, a, $3;
        mul.f32 b, b, $4;
        mul.f32 c, c, $5;
        mul.f32 d, d, $6;
        cvt.rn.satfinite.e4m3x2.f32 lo, b, a;
        cvt.rn.satfinite.e4m3x2.f32 hi, d, c;
        mov.b32 $0, {lo, hi};
        }""",
        "=r,r,r,r,r,r,r", [x, factors], dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip
    return q, scale


@gluon.jit
def _consume(
    sb, c_ptr, x_bufs, b_bufs, b64_bufs, sb_bufs, c_bufs, full, empty, tiles, M, N, K,
    HALF: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, POW2: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, WIDE, 4)
    PAIRS: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    ROW0: gl.constexpr = gl.SliceLayout(1, WIDE)
    ROW1: gl.constexpr = gl.SliceLayout(1, NARROW)
    s = 0
    phase = 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        fetched = fetch_tile(t, tiles, sb, 0, 1, M, N, 128, 192, PANEL, DENSE)
        _, c_row, c_end, col, _first_k, steps = place_tile(fetched, 1, M, K, DENSE)
        acc0 = gl.zeros([64, 128], gl.float32, WIDE)
        acc1 = gl.zeros([64, 64], gl.float32, NARROW)
        for _ in range(steps):
            mbarrier.wait(full.index(s), phase)
            q, scale = _cast(x_bufs.index(s), HALF * 64, A, PAIRS, POW2)
            part0 = warpgroup_mma(q, b_bufs.index(s).permute((1, 0)), gl.zeros_like(acc0), use_acc=False, is_async=True)
            q1 = gl.convert_layout(q, gl.DotOperandLayout(0, NARROW, 4))
            part1 = warpgroup_mma(
                q1, b64_bufs.index(s).permute((1, 0)), gl.zeros_like(acc1), use_acc=False, is_async=True
            )
            rows0 = gl.convert_layout(scale, ROW0) * sb_bufs.index(2 * s).load(ROW0)
            rows1 = gl.convert_layout(scale, ROW1) * sb_bufs.index(2 * s + 1).load(ROW1)
            part0 = warpgroup_mma_wait(1, deps=[part0])
            acc0 += part0 * rows0[:, None]
            part1 = warpgroup_mma_wait(0, deps=[part1])
            acc1 += part1 * rows1[:, None]
            mbarrier.arrive(empty.index(s), count=1)
            s, phase = advance(s, phase, STAGES)
        wide, narrow = _columns(col)
        # No TMA store: it would keep the two consumers in step. 8192 x 4096 x 4096: 415 us with TMA, 383 us with stores
        # by each thread (H200, 2026-11-21).
        store(acc0, None, c_ptr, c_bufs.index(HALF), c_row + HALF * 64, c_end, wide, N, WIDE, ALIGNED)
        store_tile(acc1.to(c_ptr.dtype.element_ty), c_ptr, c_row + HALF * 64, c_end, narrow, N, NARROW, ALIGNED)


@gluon.jit
def fp8_gemm_inside_kernel(
    x_desc, b_desc, b64_desc, sb, c_ptr, tiles, M, N, K,
    STAGES: gl.constexpr, PANEL: gl.constexpr, POW2: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 128, BK], x_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 128, BK], b_desc.layout)
    b64_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 64, BK], b64_desc.layout)
    sb_bufs = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    c_bufs = result_buffers(c_ptr, 2, 64, 128)
    gl.warp_specialize([
        (_consume, (sb, c_ptr, x_bufs, b_bufs, b64_bufs, sb_bufs, c_bufs, full, empty, tiles, M, N, K,
                    0, STAGES, PANEL, POW2, ALIGNED)),
        (_consume, (sb, c_ptr, x_bufs, b_bufs, b64_bufs, sb_bufs, c_bufs, full, empty, tiles, M, N, K,
                    1, STAGES, PANEL, POW2, ALIGNED)),
        (_produce, (x_desc, b_desc, b64_desc, sb, x_bufs, b_bufs, b64_bufs, sb_bufs, full, empty, tiles, M, N, K,
                    STAGES, PANEL)),
    ], [4, 1], [232, 40])  # fmt: skip


def multiply_inside(x: jax.Array, b: Operand, *, out_dtype, pow2: bool = False, tiles: Tiles, cores: int) -> jax.Array:
    """x[M, K], cast in 1x128 blocks, times B.T with b[N, K] in 128x128 blocks -> [M, N]. tiles: only panel is used."""
    (M, K), N = x.shape, b.values.shape[0]
    count = -(-M // 128) * -(-N // 192)
    x_desc = TensorDescriptor.from_array(pad_to_16_bytes(x), (128, 128), layout=tile_layout(x.dtype, (128, 128)))
    values = pad_to_16_bytes(b.values)
    b_descs = [
        TensorDescriptor.from_array(values, (rows, 128), layout=tile_layout(values.dtype, (64, 128)))
        for rows in (128, 64)
    ]
    return triton_call(
        x_desc, *b_descs, b.scales.reshape(-1), kernel=fp8_gemm_inside_kernel, grid=min(cores, count),
        name="fp8_gemm_inside", out_type=out_struct((M, N), out_dtype, like=x), flops=2 * M * N * K,
        tiles=count, M=M, N=N, K=K,
        STAGES=3, PANEL=tiles.panel, POW2=pow2, ALIGNED=N % 8 == 0,
    )  # fmt: skip
