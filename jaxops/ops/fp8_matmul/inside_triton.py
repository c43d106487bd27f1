"""C = x @ B.T for Hopper with x in bfloat16: each consumer finds the scales of its 64 x 128 of x, casts them in registers and multiplies from there.

The cast of x costs no pass over memory, but every block of 128 columns of C does it again: it pays where C is narrow.
"""

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from jaxops._lib import fp8
from jaxops._lib.device import current_device
from jaxops._lib.launch_triton import TensorDescriptor, triton_call
from jaxops._lib.manual_axes import out_struct
from jaxops.ops.fp8_matmul.gemm_triton import BK, DENSE, _advance, _locate, _store, _tile_layout, _whole_16_bytes
from jaxops.ops.fp8_matmul.operand import Operand
from jaxops.ops.fp8_matmul.plan import Tiles

LEAST, MOST, PER_MOST = gl.constexpr(fp8.LEAST), gl.constexpr(fp8.MOST), gl.constexpr(1 / 448)


@gluon.jit
def _produce(
    x_desc, b_desc, sb, x_bufs, b_bufs, sb_bufs, full, empty, tiles, M, N, K, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr
):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    s = 0
    phase = 1
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, a_row, b_row, _c_row, _c_end, col, _first_k, steps = _locate(t, sb, 0, 1, M, N, K, BM, BN, PANEL, DENSE)
        scales = sb + col // 128 * steps
        scale = gl.load(scales)
        for k in range(steps):
            mbarrier.wait(empty.index(s), phase)
            sb_bufs.index(s).store(gl.full([1], scale, gl.float32, ONE))
            mbarrier.expect(full.index(s), x_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
            tma.async_load(x_desc, [a_row, k * BK], full.index(s), x_bufs.index(s))
            tma.async_load(b_desc, [b_row, k * BK], full.index(s), b_bufs.index(s))
            scale = gl.load(scales + min(k + 1, steps - 1))
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1


@gluon.jit
def _scale_and_factor(amax, POW2: gl.constexpr):
    """As `jaxops._lib.fp8.scale_and_factor`, to the bit, for e4m3 and an amax that is a bfloat16 number."""
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
def _cast(x_bufs, full, s, phase, HALF: gl.constexpr, A: gl.constexpr, POW2: gl.constexpr):
    """A consumer's rows of one step in FP8, in registers, and their scales."""
    mbarrier.wait(full.index(s), phase)
    x = x_bufs.index(s).slice(64 * HALF, 64).load(A).to(gl.float32)
    scale, factor = _scale_and_factor(gl.max(gl.abs(x), axis=1), POW2)
    return (x * factor[:, None]).to(gl.float8e4nv), scale


@gluon.jit
def _consume(
    sb, c_ptr, x_bufs, b_bufs, sb_bufs, c_bufs, full, empty, tiles, M, N, K,
    HALF: gl.constexpr, MMA: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr,
    POW2: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    H: gl.constexpr = HALF * 64
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    s = 0
    phase = 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, _a_row, _b_row, c_row, c_end, col, _first_k, steps = _locate(t, sb, 0, 1, M, N, K, BM, BN, PANEL, DENSE)
        acc = gl.zeros([64, BN], gl.float32, MMA)
        q, scale = _cast(x_bufs, full, s, phase, HALF, A, POW2)
        for k in range(steps):
            part = warpgroup_mma(q, b_bufs.index(s).permute((1, 0)), gl.zeros_like(acc), use_acc=False, is_async=True)
            # Beside that product the next step's cast; behind the last step the same one's again, which nobody uses.
            following, next_phase = _advance(s, phase, STAGES)
            ahead = gl.where(k + 1 < steps, following, s)
            next_q, next_scale = _cast(x_bufs, full, ahead, gl.where(k + 1 < steps, next_phase, phase), HALF, A, POW2)
            rows = gl.convert_layout(scale, gl.SliceLayout(1, MMA)) * sb_bufs.index(s).load(gl.SliceLayout(1, MMA))
            part = warpgroup_mma_wait(0, deps=[part])
            acc += part * rows[:, None]
            mbarrier.arrive(empty.index(s), count=1)
            s, phase = following, next_phase
            q, scale = next_q, next_scale
        _store(acc, c_ptr, c_bufs.index(HALF), c_row + H, c_end, col, N, MMA, ALIGNED)


@gluon.jit
def fp8_gemm_inside_kernel(
    x_desc, b_desc, sb, c_ptr, tiles, M, N, K,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, POW2: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, BK], b_desc.layout)
    sb_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    NARROW: gl.constexpr = c_ptr.dtype.element_ty.primitive_bitwidth == 16
    C_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BN], gl.bfloat16)
    C_TYPE: gl.constexpr = c_ptr.dtype.element_ty if NARROW else gl.bfloat16
    c_bufs = gl.allocate_shared_memory(C_TYPE, [2, 64, BN] if NARROW else [2, 8, 64], C_LAYOUT)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    gl.warp_specialize([
        (_consume, (sb, c_ptr, x_bufs, b_bufs, sb_bufs, c_bufs, full, empty, tiles, M, N, K, 0, MMA, BM, BN, STAGES, PANEL, POW2, ALIGNED)),
        (_consume, (sb, c_ptr, x_bufs, b_bufs, sb_bufs, c_bufs, full, empty, tiles, M, N, K, 1, MMA, BM, BN, STAGES, PANEL, POW2, ALIGNED)),
        (_produce, (x_desc, b_desc, sb, x_bufs, b_bufs, sb_bufs, full, empty, tiles, M, N, K, BM, BN, STAGES, PANEL)),
    ], [4, 1], [232, 40])  # fmt: skip


def multiply_inside(x: jax.Array, b: Operand, *, out_dtype, pow2: bool = False, tiles: Tiles) -> jax.Array:
    """x[M, K], cast in 1x128 blocks, @ B.T with b[N, K] in 128x128 blocks -> [M, N]."""
    (M, K), N = x.shape, b.values.shape[0]
    bm, bn = 128, 128  # the only tile that leaves the consumers registers enough
    count = -(-M // bm) * -(-N // bn)
    x_desc = TensorDescriptor.from_array(_whole_16_bytes(x), (bm, 128), layout=gl.NVMMASharedLayout.get_default_for([bm, 128], gl.bfloat16))
    b_desc = TensorDescriptor.from_array(_whole_16_bytes(b.values), (bn, 128), layout=_tile_layout(b.values.dtype, bn))
    return triton_call(
        x_desc, b_desc, b.scales.reshape(-1),
        kernel=fp8_gemm_inside_kernel, out_type=out_struct((M, N), out_dtype, like=x), grid=(min(current_device().cores, count),),
        num_warps=4, compute_capability=90, name="fp8_gemm_inside", tiles=count, M=M, N=N, K=K, BM=bm, BN=bn, STAGES=4, PANEL=tiles.panel,
        POW2=pow2, ALIGNED=N % 8 == 0,
    )  # fmt: skip
