"""Grouped matmul for Hopper, in Gluon: one kernel for all three passes, with TMA loads and stores, one producer warp and two consumers of four warps.

The consumers share a tile, each with half of its rows, or take turns: then each has a tile of its own, and one stores while the other multiplies, which
pays where a sum is short. Operands are read as they lie in memory: the tensor core takes both of either order, so no pass copies a transpose.

Clusters of two programs, for both of which the first loads B by multicast, gained nothing: over the Mixtral shapes' forward and dgrad they reached 712 to 777
TFLOP/s beside 718 to 781 (the card's power bounds), in wgrad 627 to 683 beside 758 to 793, and where groups are short 5 to 40 % less. H200, 2026-11-22.
"""

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from jaxops._lib.grouped_gemm_triton import CONTRACTION, ROWS, make_ring, next_tile, pass_tile, produce, sum_steps
from jaxops._lib.hopper_triton import result_buffers, store_columns, tile_at, tile_layout
from jaxops._lib.launch_triton import OutTile, Scratch, TensorDescriptor, row_windows, triton_call
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.schedule_pallas import COLUMNS, schedule_groups, schedule_rows
from jaxops._lib.tiling import tile_bound
from jaxops.ops.grouped_matmul.plan import Tiles


@gluon.jit
def _add_bias(acc, bias, group, col, N, MMA: gl.constexpr):
    cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, MMA))
    return acc + gl.load(bias + group * N + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _before(c_ptr, row, end, col, N, SHAPE: gl.constexpr, MMA: gl.constexpr):
    """What stands in C, which the sum starts from."""
    pointers, mask = tile_at(c_ptr, row, end, col, N, SHAPE, MMA, True)
    return gl.load(pointers, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _consume(
    used, WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr, STORED: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    bias, c_desc, c_ptr, facts, places, a_bufs, b_bufs, c_bufs, full, empty, turns, N = used
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    s = 0
    phase = 0
    waited = 1 - WHICH  # the first consumer has the first turn
    more = True
    while more:
        group, row, end, col, steps, s, phase, waited = next_tile(
            facts, places, full, turns, s, phase, waited, WHICH, BM, PARTS
        )
        more = steps > 0
        if row < end:
            SHAPE: gl.constexpr = [BM // PARTS, BN]
            acc = _before(c_ptr, row, end, col, N, SHAPE, MMA) if ACCUMULATE else gl.zeros(SHAPE, gl.float32, MMA)
            acc, s, phase = sum_steps(
                acc, a_bufs, b_bufs, full, empty, turns, places, steps, s, phase, WHICH, STAGES, KIND, TRANSPOSED, PARTS
            )
            if bias is not None and group >= 0:  # rows outside stay zero
                acc = _add_bias(acc, bias, group, col, N, MMA)
            if not ACCUMULATE or group >= 0:  # else an empty group's, which stays as it is, to the bit
                store_columns(acc, c_desc, c_ptr, c_bufs.index(WHICH), row, end, col, N, STORED)
        else:
            s, phase = pass_tile(full, empty, turns, places, steps, s, phase, WHICH, STAGES, PARTS)
    tma.store_wait(0)


@gluon.jit
def grouped_gemm_kernel(
    a_desc, b_desc, more_a, more_b, bias, schedule, c_desc, c_ptr, entries, G, M, N, K,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr,
    STORED: gl.constexpr, ACCUMULATE: gl.constexpr, DYNAMIC: gl.constexpr,
):  # fmt: skip
    facts, places, a_bufs, b_bufs, full, empty, turns = make_ring(b_desc, BM, BN, STAGES, KIND, TRANSPOSED, PARTS)
    c_bufs = result_buffers(c_ptr, 2, BM // PARTS, STORED)
    made = (a_desc, b_desc, None, (more_a, more_b), schedule, facts, a_bufs, b_bufs, full, empty, entries, G, M, N, K)
    used = (bias, c_desc, c_ptr, facts, places, a_bufs, b_bufs, c_bufs, full, empty, turns, N)
    gl.warp_specialize([
        (_consume, (used, 0, BM, BN, STAGES, KIND, TRANSPOSED, PARTS, STORED, ACCUMULATE)),
        (_consume, (used, 1, BM, BN, STAGES, KIND, TRANSPOSED, PARTS, STORED, ACCUMULATE)),
        (produce, (made, BM, BN, STAGES, PANEL, DYNAMIC, KIND, TRANSPOSED, PARTS)),
    ], [4, 1], [224, 56])  # fmt: skip


def fwd_triton(
    lhs, rhs, bias, offsets, more=(), *, transpose_rhs: bool, tiles: Tiles, out_dtype, cores: int
) -> jax.Array:
    """As `fwd_pallas`; bfloat16 or float16, K and N multiples of 8. more: another (lhs, rhs) of the same shapes, whose product is added before rounding."""
    (M, K), G, N = lhs.shape, rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]

    def describe(a, b):
        a = TensorDescriptor.from_array(a, (tiles.part, 64), layout=tile_layout(a.dtype, (tiles.part, 64)))
        if transpose_rhs:
            return a, TensorDescriptor.from_array(
                b.reshape(G * N, K), (tiles.bn, 64), layout=tile_layout(b.dtype, (tiles.bn, 64))
            )
        # Of three dimensions: past K come zeros, not the next group's rows.
        return a, TensorDescriptor.from_array(b, (1, 64, tiles.bn), layout=tile_layout(b.dtype, (1, 64, tiles.bn)))

    operands = (*describe(lhs, rhs), *(describe(*more) if more else (None, None)))
    schedule = schedule_rows(offsets, M, tiles.bm, False)
    out = out_struct((M, N), out_dtype, like=lhs)
    sizes = {"G": G, "M": M, "N": N, "K": K}
    name = "fwd" if not transpose_rhs else "dgrad"
    return _call(
        operands,
        bias,
        schedule,
        None,
        out,
        tile_bound(M, G, tiles.bm),
        tiles,
        sizes,
        name,
        cores,
        TRANSPOSED=transpose_rhs,
    )


def wgrad_triton(lhs, dout, accumulator, offsets, *, tiles: Tiles, out_dtype, cores: int) -> jax.Array:
    """As `wgrad_pallas`; bfloat16 or float16, K and N multiples of 8."""
    (length, M), N, G = lhs.shape, dout.shape[1], offsets.shape[0] - 1
    a = row_windows(lhs, (64, tiles.part), tile_layout(lhs.dtype, (1, 64, tiles.part)))
    b = row_windows(dout, (64, tiles.bn), tile_layout(dout.dtype, (1, 64, tiles.bn)))
    schedule = schedule_groups(offsets, length, False)
    out = out_struct((G * M, N), out_dtype, like=lhs)
    accumulator = None if accumulator is None else accumulator.reshape(G * M, N)
    sizes = {"G": G, "M": M, "N": N, "K": 0}
    return _call(
        (a, b, None, None),
        None,
        schedule,
        accumulator,
        out,
        G * -(-M // tiles.bm),
        tiles,
        sizes,
        "wgrad",
        cores,
        TRANSPOSED=False,
    ).reshape(G, M, N)


def _call(
    operands: tuple,
    bias,
    schedule,
    accumulator,
    out,
    row_tiles: int,
    tiles: Tiles,
    sizes: dict[str, int],
    name: str,
    cores: int,
    **constants,
) -> jax.Array:
    store_from = OutTile(
        (tiles.part, tiles.stored), tile_layout(out.dtype, (1, tiles.part, tiles.stored)), accumulator, windows=True
    )
    count = row_tiles * -(-sizes["N"] // tiles.bn)
    work = Scratch(schedule) if tiles.dynamic else schedule
    return triton_call(
        *operands, bias, work, store_from, kernel=grouped_gemm_kernel, out_type=out, grid=min(cores, count),
        name=f"grouped_matmul_{name}", entries=schedule.shape[0] // COLUMNS, **sizes, BM=tiles.bm, BN=tiles.bn, STAGES=tiles.stages, PANEL=tiles.panel,
        KIND=(CONTRACTION if name == "wgrad" else ROWS).value, PARTS=tiles.bm // tiles.part, STORED=tiles.stored, ACCUMULATE=accumulator is not None,
        DYNAMIC=tiles.dynamic, **constants,
    )  # fmt: skip
